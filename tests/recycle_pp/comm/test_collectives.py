"""Collectives made of messages. Workers are threads; the network is a table of queues."""

import queue
import threading
from collections import defaultdict
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle_pp.comm.tcp import collectives


class Network:
    def __init__(self):
        self._lanes = defaultdict(queue.Queue)
        self._lock = threading.Lock()

    def lane(self, frm: int, to: int, slot: int) -> queue.Queue:
        with self._lock:
            return self._lanes[frm, to, slot]

    def routes(self, me: int, count: int) -> list:
        return [None if other == me else Route(self, me, other) for other in range(count)]


class Route:
    """A network of queues: messages of one slot between two workers stay in order; data is copied at the send."""

    def __init__(self, network: Network, me: int, other: int):
        self.network, self.me, self.other = network, me, other

    def send(self, tensor, slot):
        self.network.lane(self.me, self.other, slot).put(tensor.clone())
        return Done(lambda: None)

    def receive(self, tensor, slot):
        lane = self.network.lane(self.other, self.me, slot)
        return Done(lambda: tensor.copy_(lane.get(timeout=60)))


class Done:
    def __init__(self, wait):
        self.wait = wait


def everywhere(count: int, function) -> list:
    """Runs `function(worker, routes)` on all workers at once; their results."""
    network, results, errors = Network(), [None] * count, []

    def run(me: int) -> None:
        try:
            results[me] = function(me, network.routes(me, count))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(me,)) for me in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert not errors, errors
    return results


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(2, 5),
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=3),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.int64]),
    small=st.sampled_from([0, 100, 1000]),
    piece=st.sampled_from([8, 64, 1 << 22]),
    seed=st.integers(0, 2**31),
)
def test_an_all_reduce_gives_every_worker_the_sum_in_the_order_of_the_workers(count, sizes, dtype, small, piece, seed):
    generator = torch.Generator().manual_seed(seed)
    given_ = [[(torch.randn(n, generator=generator) * 1e6).to(dtype) for n in sizes] for _ in range(count)]
    expected = []
    for tensors in zip(*given_, strict=True):
        total = tensors[0].clone()
        for tensor in tensors[1:]:
            total = total + tensor
        expected.append(total)

    def reduce(me, routes):
        tensors = [tensor.clone() for tensor in given_[me]]
        collectives.all_reduce(tensors, routes, slot=9)
        return tensors

    with mock.patch.multiple(collectives, SMALL=small, PIECE=piece):
        results = everywhere(count, reduce)
    for tensors in results:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(tensors, expected, strict=True))


def test_an_all_reduce_keeps_the_shape_and_works_in_place():
    def reduce(me, routes):
        matrix = torch.full((3, 5), float(me + 1))
        collectives.all_reduce([matrix], routes, slot=0)
        return matrix

    assert all(torch.equal(matrix, torch.full((3, 5), 6.0)) for matrix in everywhere(3, reduce))


@pytest.mark.parametrize("root", [0, 1, 2])
def test_a_reduce_gives_one_worker_the_sums_in_the_order_of_the_workers(root):
    given_ = [[torch.tensor([big, 3.0]), torch.empty(0)] for big in (1e8, -1e8, 1.0)]

    def reduce(me, routes):
        tensors = [tensor.clone() for tensor in given_[me]]
        collectives.reduce(tensors, routes, root, slot=3)
        return tensors

    for me, (found, _) in enumerate(everywhere(3, reduce)):
        assert found.tolist() == ([1.0, 9.0] if me == root else given_[me][0].tolist())


@pytest.mark.parametrize("source", [0, 2])
def test_a_broadcast_copies_the_tensors_of_its_source(source):
    def share(me, routes):
        tensors = [torch.full((4,), float(me)), torch.empty(0), torch.tensor([me])]
        collectives.broadcast(tensors, routes, source, slot=1)
        return tensors

    for a, _, b in everywhere(3, share):
        assert torch.equal(a, torch.full((4,), float(source))) and b.item() == source
