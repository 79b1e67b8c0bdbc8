"""A tied embedding in two stages, held by all or by some workers. Every holder has the gradient that a single worker
would have, bit for bit, and all workers have its norms."""

import queue
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recycle_schedules import Worker

from recycle_pp.data.batches import Batches
from recycle_pp.numerics import torch_operations as ops
from recycle_pp.numerics.gradients import Gradients
from recycle_pp.numerics.layout import Layout
from recycle_pp.numerics.optimizer import StageOptimizer
from recycle_pp.protocol.holdings import Holdings
from recycle_pp.protocol.units import Units
from recycle_pp.state.exchange import Exchange
from recycle_pp.state.pieces import pieces
from recycle_pp.state.ties import Ties
from recycle_pp.wire.messages.generations import Report

from ..in_process import CPU, backward, forward, pipeline, reduce_alone, small
from ..numerics.test_units import cut


class Network:
    """Messages and sums between threads. ordered: messages have no tags, and are only sent between stages."""

    def __init__(self, workers, ordered):
        self.ordered = ordered
        self.boxes = {}
        self.stages = {w.stage: sorted(v for v in workers if v.stage == w.stage) for w in workers}
        self.barriers = {stage: threading.Barrier(len(of), timeout=120) for stage, of in self.stages.items()}
        self.parts = {}
        self.sent = []

    def links(self, me):
        met = set()

        def box(frm, to, tag):
            assert not self.ordered or (frm.stage != to.stage and {frm, to} - {me} <= met)
            # setdefault is atomic. With defaultdict, two threads could each make a queue for the same key.
            return self.boxes.setdefault((frm, to, 0 if self.ordered else tag), queue.Queue())

        def send(tensor, to, tag):
            self.sent.append((me, to))
            box(me, to, tag).put(tensor.clone())

        def receive(tensor, frm, tag):
            return SimpleNamespace(wait=lambda: tensor.copy_(box(frm, me, tag).get(timeout=20)))

        def together(tensors, result):
            """result(peer -> tensor): the new value of this worker's tensor."""
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
@given(st.integers(128, 1500), st.integers(0, 3), st.integers(0, 9), st.booleans())
def test_each_holder_of_a_tied_unit_has_the_gradient_of_a_single_worker(numerics, block, copies, step, ordered):
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
    optimizers = {w: StageOptimizer(config, of_pipelines[w.pipeline][w.stage], not copies) for w in workers}
    layouts = {stage.stage: stage.layout for stage in alone}
    network = Network(workers, ordered)
    shares = shared_out(copies, workers, {s: layout.described for s, layout in layouts.items()})

    def reduce(w):
        stage = of_pipelines[w.pipeline][w.stage]
        exchange = Exchange(network.links(w), stage, optimizers[w], w, lambda pending, giver=None: pending.wait())
        for unit, holders in enumerate(shares[w.stage].holders.values()):
            if w.pipeline in holders and copies:
                optimizers[w].begin(unit)
        reduced = exchange.reduce(shares[w.stage], range(3), lambda: None)
        assert exchange.tied.units
        once = exchange.tied.reduce(shares[w.stage], reduced)
        kept = replace(once, flat=once.flat.clone())
        return kept, exchange.tied.reduce(shares[w.stage], once)  # again, as in the next generation

    with ThreadPoolExecutor(len(workers)) as pool:
        for w, (once, again) in zip(workers, pool.map(reduce, workers), strict=True):
            stage, whole = of_pipelines[w.pipeline][w.stage], expected[w.stage]
            held = [unit for unit, holders in enumerate(shares[w.stage].holders.values()) if w.pipeline in holders]
            for found in (once, again):
                assert found.squares == whole.squares and (found.finite, found.fits) == (whole.finite, whole.fits)
                grads = stage.gradients.grads(found)
                assert sorted(grads) == held
                for unit, grad in grads.items():
                    assert torch.equal(grad, whole.flat[stage.layout.spans[unit]]), stage.layout.unit_names[unit]
            alone[w.stage].gradients.follow(whole)
            stage.gradients.follow(again)
            assert torch.equal(stage.gradients.exponents, alone[w.stage].gradients.exponents)
    assert copies or len(network.sent) == 2 * 6, "each time, each worker sends its sums to one of the other stage"


def shared_out(copies, workers, described):
    """The shares at the start. described: stage -> its layers, see `Ready.units`"""
    units = Units(copies)
    for worker in workers:
        units.describe(worker, "", described[worker.stage])
    return units.share_out({w: Report(0, [], False, 0.0, Holdings(w.pipeline, [], -1).reported()) for w in workers}, -1)


@pytest.mark.parametrize("whole", [True, False])
def test_a_tied_tensor_is_saved_once(whole):
    stages = pipeline(small(model__tied=True))
    saved = []
    for stage in stages:
        optimizer, units = StageOptimizer(stage.settings, stage, whole), range(len(stage.layout.units))
        for unit in () if whole else units:
            optimizer.begin(unit)
        saved.append({key.partition("@")[0] for key in pieces(optimizer, stage, units)})
    assert "model.embedding.weight" in saved[0] and not saved[0] & saved[1]


TIED = (0, 1, 3)
LAYERS = {0: {0: "a", 9: "tied"}, 1: {1: "b", 9: "tied"}, 2: {2: "c"}, 3: {3: "d", 4: "e", 9: "tied"}}
alive = st.sets(st.builds(Worker, st.integers(0, 4), st.integers(0, 3)), min_size=4).filter(
    lambda workers: {worker.stage for worker in workers} == set(range(4))
)


@given(alive)
def test_with_whole_state_every_worker_receives_one_message_per_stage_from_evenly_loaded_peers(members):
    described = {stage: {layer: [(name, 128)] for layer, name in of.items()} for stage, of in LAYERS.items()}
    shares, sent, awaited, order = shared_out(0, members, described), [], [], defaultdict(list)
    for me in sorted(members):
        if me.stage in TIED:
            wire(me, shares[me.stage], sent, awaited, order)
    assert sorted(sent) == sorted(awaited) and len(sent) == len({*sent})
    for me in members:
        others = [stage for stage in TIED if stage != me.stage] if me.stage in TIED else []
        assert sorted(frm.stage for frm, to in awaited if to == me) == others
        assert sum(frm == me for frm, _ in sent) <= 2 * 5
    for (me, other), messages in order.items():
        assert messages == order[other, me], "on one ordered stream, each message meets its other end"


def wire(me, shares, sent, awaited, order):
    """The tied units that a worker sends and awaits, without tensors."""

    def send(tensor, to, tag):
        sent.append((me, to))
        order[me, to].append((me, to))

    def receive(room, frm, tag):
        awaited.append((frm, me))
        order[me, frm].append((frm, me))

    links = SimpleNamespace(ordered=False, meetings=lambda me, others: [], send=send, receive=receive)
    layers = LAYERS[me.stage]
    layout = Layout({name: (4,) for name in layers.values()}, lambda *_: None, [*layers])
    gradients = Gradients(layout, 2, CPU, reproducible=True, ops=ops, shared=["tied"])
    stage = SimpleNamespace(gradients=gradients, stage=me.stage, module=SimpleNamespace(shared={"tied": [0, 1, 3]}))
    tied = Ties(links, stage, me, lambda pending, giver: None, None)
    tied.reduce(shares, gradients.reduced(gradients.payload()))
