"""The control store works as the rendezvous store of torch's C++ code, and its waits end with their generation."""

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo

from recycle_pp.comm.store import ControlStore
from recycle_pp.comm.waiting import LinkBroken


def connected(count: int) -> list[ControlStore]:
    """Stores of `count` workers, and a coordinator that forwards published values to all."""
    stores: list[ControlStore] = []

    def publisher(k: int):
        return lambda key, value: [store.deliver(key, value) for j, store in enumerate(stores) if j != k]

    stores += [ControlStore(publisher(k)) for k in range(count)]
    return stores


def in_thread(function, *arguments):
    """Runs a function in a thread; `outcome`: its result or exception."""
    thread = threading.Thread(target=lambda: setattr(thread, "outcome", attempt(function, *arguments)), daemon=True)
    thread.start()
    return thread


def attempt(function, *arguments):
    try:
        return function(*arguments)
    except BaseException as error:
        return error


def test_every_worker_gets_a_value_that_one_worker_sets():
    first, second = connected(2)
    waiting = in_thread(second.get, "3/address")
    first.set("3/address", b"\x00\xff")
    waiting.join(5)
    assert waiting.outcome == first.get("3/address") == b"\x00\xff"
    assert second.check(["3/address"]) and not second.check(["3/address", "3/other"])


def test_a_batch_is_one_message():
    published = []
    store = ControlStore(lambda key, value: published.append((key, value)))
    with store.one_message():
        store.set("1/a", b"x")
        store.set("1/b", b"y")
        assert store.get("1/a") == b"x" and not published
    assert len(published) == 1
    other = ControlStore(lambda key, value: None)
    other.deliver(*published[0])
    assert other.multi_get(["1/a", "1/b"]) == [b"x", b"y"]


def test_abandoning_a_generation_ends_its_waits_and_those_of_older_generations():
    (store,) = connected(1)
    waits = [in_thread(store.wait, [f"{generation}/address"]) for generation in (3, 4, 5)]
    time.sleep(0.05)
    store.abandon(4)
    for wait in waits[:2]:
        wait.join(5)
        assert isinstance(wait.outcome, LinkBroken)
    assert waits[2].is_alive()
    store.close()
    waits[2].join(5)
    assert isinstance(waits[2].outcome, LinkBroken)


def test_late_values_of_an_abandoned_generation_are_dropped():
    (store,) = connected(1)
    store.set("4/address", b"x")
    store.abandon(4)
    store.deliver("4/late", b"x")
    store.deliver("5/address", b"x")
    assert store.num_keys() == 1


def test_a_cancelled_wait_ends_when_it_is_woken():
    (store,) = connected(1)
    cancelled = threading.Event()
    collecting = in_thread(store.collect, ["7/mesh/0"], cancelled.is_set)
    time.sleep(0.02)
    store.wake()
    time.sleep(0.02)
    assert collecting.is_alive()
    cancelled.set()
    store.wake()
    collecting.join(5)
    assert isinstance(collecting.outcome, LinkBroken)


def test_a_timed_out_wait_names_the_missing_keys():
    (store,) = connected(1)
    store.set("1/here", b"")
    with pytest.raises(TimeoutError, match=r"timed out after .* s waiting for 1/away"):
        store.wait(["1/here", "1/away"], timedelta(seconds=0.01))


def gloo(store: ControlStore, rank: int, size: int, lazy: bool) -> ProcessGroupGloo:
    options = ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=30)
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=lazy)]
    return ProcessGroupGloo(dist.PrefixStore("7/world", store), rank, size, options)


@pytest.mark.parametrize("lazy", [True, False])
def test_gloo_finds_its_members_through_it(lazy):
    building = [in_thread(gloo, store, rank, 3, lazy) for rank, store in enumerate(connected(3))]
    for thread in building:
        thread.join(20)
    groups = [thread.outcome for thread in building]
    sums = [torch.full((4,), float(rank)) for rank in range(3)]
    for work in [group.allreduce([x]) for group, x in zip(groups, sums, strict=True)]:
        work.wait()
    assert all(torch.equal(x, torch.full((4,), 3.0)) for x in sums)


def test_gloos_constructor_waiting_for_a_dead_member_can_be_abandoned():
    store = connected(2)[0]  # the other member never comes
    building = in_thread(gloo, store, 0, 2, False)
    time.sleep(0.2)
    assert building.is_alive()
    store.abandon(7)
    building.join(5)
    assert isinstance(building.outcome, LinkBroken)


def test_nccl_may_clone_it():
    (store,) = connected(1)
    store.set("1/prefix/key", b"value")
    assert dist.PrefixStore("1/prefix", store).clone().get("key") == b"value"
