"""Every holder of a tied embedding gets the gradient that a single worker would have, bit for bit.

The embedding is in two stages, and all or some of their workers hold it. All workers get its norms.
"""

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
from recycle_pp.state.checkpoint_tensors import pieces
from recycle_pp.state.exchange import Exchange
from recycle_pp.state.ties import Ties
from recycle_pp.wire.messages.generations import Report

from ..in_process import CPU, backward, forward, pipeline, reduce_alone, small
from ..numerics.test_units import cut


class Network:
    """Messages and sums between workers that are threads.

    ordered: messages have no tags, and are sent only between stages
    """

    def __init__(self, members, ordered):
        self.ordered, self.members = ordered, members
        self.boxes = {}
        self.stages = {w.stage: sorted(m for m, v in members.items() if v.stage == w.stage) for w in members.values()}
        self.barriers = {stage: threading.Barrier(len(of), timeout=120) for stage, of in self.stages.items()}
        self.parts = {}
        self.sent = []
        self.rooms = {member: [] for member in members}  # tensors into which each worker has received

    def links(self, me):
        met, stage = set(), self.members[me].stage

        def box(frm, to, tag):
            other = self.members[to if frm == me else frm].stage
            assert not self.ordered or (other != stage and {frm, to} - {me} <= met)
            # setdefault is atomic. With defaultdict, two threads could each make a queue for the same key.
            return self.boxes.setdefault((frm, to, 0 if self.ordered else tag), queue.Queue())

        def send(tensor, to, tag):
            self.sent.append((me, to))
            box(me, to, tag).put(tensor.clone())

        def receive(tensor, frm, tag):
            self.rooms[me].append(tensor)
            return SimpleNamespace(wait=lambda: tensor.copy_(box(frm, me, tag).get(timeout=20)))

        def together(tensors, result):
            """result(peer -> tensor): the new value of this worker's tensor."""
            barrier = self.barriers[stage]
            self.parts[me] = [tensor.clone() for tensor in tensors]
            barrier.wait()
            for number, tensor in enumerate(tensors):
                tensor.copy_(result({peer: self.parts[peer][number] for peer in self.stages[stage]}))
            barrier.wait()
            return SimpleNamespace(wait=lambda: None)

        return SimpleNamespace(
            ordered=self.ordered,
            meetings=lambda me, members: met.update(members) or [],
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

    members = {2 * d + s: Worker(d, s) for d in range(3) for s in range(2)}
    stages = {member: of_pipelines[worker.pipeline][worker.stage] for member, worker in members.items()}
    optimizers = {member: StageOptimizer(config, stage, not copies) for member, stage in stages.items()}
    layouts = {stage.stage: stage.layout for stage in alone}
    network = Network(members, ordered)
    shares = shared_out(copies, members, {s: layout.described for s, layout in layouts.items()})

    def reduce(me):
        stage, share = stages[me], shares[members[me].stage]
        exchange = Exchange(network.links(me), stage, optimizers[me], me, lambda pending, giver=None: pending.wait())
        for unit, holders in enumerate(share.holders.values()):
            if me in holders and copies:
                optimizers[me].begin(unit)
        reduced = exchange.sum_gradients(share, network.stages[members[me].stage], lambda: None)
        assert exchange.tied.units
        once = exchange.tied.reduce(share, reduced, stage.gradients.exponents)
        kept = replace(once, flat=once.flat.clone())
        return kept, exchange.tied.reduce(share, once, stage.gradients.exponents)  # again, as in the next generation

    with ThreadPoolExecutor(len(members)) as pool:
        for (me, w), (once, again) in zip(members.items(), pool.map(reduce, members), strict=True):
            stage, whole = stages[me], expected[w.stage]
            held = [unit for unit, holders in enumerate(shares[w.stage].holders.values()) if me in holders]
            for found in (once, again):
                assert found.squares == whole.squares and (found.finite, found.fits) == (whole.finite, whole.fits)
                grads = stage.gradients.grads(found)
                assert sorted(grads) == held
                for unit, grad in grads.items():
                    assert torch.equal(grad, whole.flat[stage.layout.spans[unit]]), stage.layout.unit_names[unit]
            alone[w.stage].gradients.follow(whole)
            stage.gradients.follow(again)
            assert torch.equal(stage.gradients.exponents, alone[w.stage].gradients.exponents)
    assert copies or len(network.sent) == 2 * 6, (
        "in each reduction, each worker sends its sums to one worker of the other stage"
    )


def shared_out(copies, members, described):
    """The shares at the start of a job. described: stage -> its layers, as in `Ready.units`."""
    units = Units(copies)
    for member, worker in members.items():
        units.describe(member, worker.stage, "", described[worker.stage])
    reports = {member: Report(0, [], False, 0.0, Holdings(member, [], -1).reported()) for member in members}
    return units.share_out(members, reports, -1)


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
alive = (
    st.sets(st.builds(Worker, st.integers(0, 4), st.integers(0, 3)), min_size=4)
    .filter(lambda workers: {worker.stage for worker in workers} == set(range(4)))
    .map(lambda workers: {4 * worker.pipeline + worker.stage: worker for worker in workers})
)


@given(alive)
def test_with_whole_state_every_worker_receives_one_message_per_stage_from_evenly_loaded_peers(members):
    described = {stage: {layer: [(name, 128)] for layer, name in of.items()} for stage, of in LAYERS.items()}
    shares, sent, awaited, order = shared_out(0, members, described), [], [], defaultdict(list)
    for me, worker in sorted(members.items()):
        if worker.stage in TIED:
            wire(me, worker.stage, shares[worker.stage], sent, awaited, order)
    assert sorted(sent) == sorted(awaited) and len(sent) == len({*sent})
    for me, worker in members.items():
        others = [stage for stage in TIED if stage != worker.stage] if worker.stage in TIED else []
        assert sorted(members[frm].stage for frm, to in awaited if to == me) == others
        assert sum(frm == me for frm, _ in sent) <= 2 * 5
    for (me, other), messages in order.items():
        assert messages == order[other, me], "both ends have their messages in the same order"


def wire(me, number, shares, sent, awaited, order):
    """Records, without tensors, the messages about tied units that a member of stage `number` sends and awaits."""

    def send(tensor, to, tag):
        sent.append((me, to))
        order[me, to].append((me, to))

    def receive(room, frm, tag):
        awaited.append((frm, me))
        order[me, frm].append((frm, me))

    links = SimpleNamespace(ordered=False, meetings=lambda me, others: [], send=send, receive=receive)
    layers = LAYERS[number]
    layout = Layout({name: (4,) for name in layers.values()}, lambda *_: None, [*layers])
    gradients = Gradients(layout, 2, CPU, reproducible=True, ops=ops, shared=["tied"])
    stage = SimpleNamespace(gradients=gradients, stage=number, module=SimpleNamespace(shared={"tied": [0, 1, 3]}))
    tied = Ties(links, stage, me, lambda pending, giver: None, None)
    tied.reduce(shares, gradients.reduced(gradients.payload()), gradients.exponents)
