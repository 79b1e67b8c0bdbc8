"""A tied embedding whose blocks lie on some workers of two stages: each holder has the gradient that one worker alone
would have, bit for bit, and all know of it what that one does."""

import queue
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recycle_schedules import Worker

from recycle_pp.data.batches import Batches
from recycle_pp.numerics.shards import ShardedOptimizer
from recycle_pp.protocol.holdings import Holdings
from recycle_pp.protocol.shards import Shards
from recycle_pp.state.shards import Exchange
from recycle_pp.wire.messages.workers import Report

from ..in_process import backward, forward, pipeline, reduce_alone, small
from ..numerics.test_shards import cut


class Network:
    """Messages and sums between threads. ordered: as over groups, messages have no tags, and none within a stage."""

    def __init__(self, workers, ordered):
        self.ordered = ordered
        self.boxes = defaultdict(queue.Queue)
        self.stages = {w.stage: sorted(v for v in workers if v.stage == w.stage) for w in workers}
        self.barriers = {stage: threading.Barrier(len(of), timeout=20) for stage, of in self.stages.items()}
        self.parts = {}

    def links(self, me):
        met = set()

        def box(frm, to, tag):
            assert not self.ordered or (frm.stage != to.stage and {frm, to} - {me} <= met)
            return self.boxes[frm, to, 0 if self.ordered else tag]

        def send(tensor, to, tag):
            box(me, to, tag).put(tensor.clone())

        def receive(tensor, frm, tag):
            return SimpleNamespace(wait=lambda: tensor.copy_(box(frm, me, tag).get(timeout=20)))

        def together(tensors, result):
            """result: of what all peers have, (what becomes of) this worker's tensor."""
            barrier = self.barriers[me.stage]
            self.parts[me] = [tensor.clone() for tensor in tensors]
            barrier.wait()
            for number, tensor in enumerate(tensors):
                tensor.copy_(result({peer: self.parts[peer][number] for peer in self.stages[me.stage]}))
            barrier.wait()
            return SimpleNamespace(wait=lambda: None)

        return SimpleNamespace(
            ordered=self.ordered,
            meetings=lambda me, workers: met.update(workers) or [],
            send=send,
            receive=receive,
            all_reduce=lambda tensors: together(tensors, lambda parts: sum(parts.values())),
            reduce=lambda tensors, to: together(
                tensors, lambda parts: sum(parts.values()) if to == me else torch.ones_like(parts[me])
            ),
            broadcast=lambda tensors, source: together(tensors, lambda parts: parts[source]),
        )


@pytest.mark.parametrize("numerics", [{}, {"numerics__sums": "int32"}, {"numerics__precision": "bf16"}], ids=str)
@settings(max_examples=5, deadline=None)
@given(st.integers(128, 1500), st.integers(1, 3), st.integers(0, 9), st.booleans())
def test_each_holder_of_a_tied_block_has_the_gradient_of_one_worker_alone(numerics, block, copies, step, ordered):
    config = small(
        model__tied=True, numerics__reproducible=True, parallel__pipelines=3, parallel__microbatches=2, **numerics
    )
    batches = Batches(config)
    alone = [cut(stage, block) for stage in pipeline(config)]
    of_pipelines = [[cut(stage, block) for stage in pipeline(config)] for _ in range(3)]
    for g in range(6):
        for stages in (alone, of_pipelines[g % 3]):
            forward(stages, batches, step, g)
            backward(stages, g)
    expected = reduce_alone(alone)

    workers = [Worker(d, s) for d in range(3) for s in range(2)]
    optimizers = {w: ShardedOptimizer(config, of_pipelines[w.pipeline][w.stage]) for w in workers}
    sizes = [stage.layout.block_sizes for stage in alone]
    shards, network = Shards(copies), Network(workers, ordered)
    shards.names = {s: optimizers[Worker(0, s)].names for s in range(2)}
    reports = {w: Report(0, [], False, 0.0, Holdings(w.pipeline, sizes[w.stage], -1).reported()) for w in workers}
    shares = shards.share_out(reports, -1)

    def reduce(w):
        stage = of_pipelines[w.pipeline][w.stage]
        exchange = Exchange(network.links(w), stage, optimizers[w], w, lambda pending, giver=None: pending.wait())
        for number, holders in enumerate(shares[w.stage].holders):
            if w.pipeline in holders:
                optimizers[w].begin(number)
        reduced = exchange.reduce(shares[w.stage], range(3), lambda: None)
        assert exchange.tied.blocks
        once = exchange.tied.unite(shares[w.stage], reduced)
        return once, exchange.tied.unite(shares[w.stage], reduced)  # as in the next generation

    with ThreadPoolExecutor(len(workers)) as pool:
        for w, (once, again) in zip(workers, pool.map(reduce, workers), strict=True):
            stage, whole = of_pipelines[w.pipeline][w.stage], expected[w.stage]
            for found in (once, again):
                assert found.squares == whole.squares and (found.finite, found.fits) == (whole.finite, whole.fits)
            for number, holders in enumerate(shares[w.stage].holders):
                if w.pipeline in holders:
                    grad = optimizers[w].gradient(number)
                    assert torch.equal(grad, whole.flat[stage.layout.spans[number]]), optimizers[w].names[number]
            alone[w.stage].gradients.follow(whole)
            stage.gradients.follow(again)
            assert torch.equal(stage.gradients.exponents, alone[w.stage].gradients.exponents)


def test_what_is_tied_is_saved_once():
    first, last = (ShardedOptimizer(small(), stage) for stage in pipeline(small(model__tied=True)))
    for optimizer in (first, last):
        for block in range(len(optimizer.names)):
            optimizer.begin(block)
    saved = [{key.partition("@")[0] for key in optimizer.pieces(everything=True)} for optimizer in (first, last)]
    assert "model.embedding.weight" in saved[0] and not saved[0] & saved[1]
