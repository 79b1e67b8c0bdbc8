"""Sharded state has the same values whether the optimizer lets tensors be cut into units or keeps them whole."""

from concurrent.futures import ThreadPoolExecutor
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recycle_schedules import Worker

from recycle_pp.model.stage import Stage
from recycle_pp.numerics.optimizer import StageOptimizer
from recycle_pp.protocol.holders import missing, placed, refilled
from recycle_pp.state import checkpoint
from recycle_pp.state.checkpoint_tensors import pieces, tensors_of
from recycle_pp.state.exchange import Exchange
from recycle_pp.wire.messages.generations import Shares

from ..in_process import CPU, same, small
from ..numerics.test_units import cut
from .test_ties import Network

WHOLE = None  # size of a unit: each tensor is one


@pytest.mark.parametrize("numerics", [{}, {"reproducible": True, "sums": "int32"}, {"precision": "bf16"}], ids=str)
@settings(max_examples=3, deadline=None)
@given(st.integers(384, 1500), st.integers(1, 3), st.booleans(), st.data())
def test_whole_tensors_give_the_weights_and_checkpoints_of_units_by_rows(numerics, size, copies, ordered, data):
    """A worker dies during the training. Then each run resumes from the checkpoint of the other."""
    config = small(
        **{f"numerics__{key}": value for key, value in numerics.items()},
        model__layers=1, parallel__stages=1, parallel__pipelines=3, parallel__microbatches=2,
    )  # fmt: skip
    dies = data.draw(st.integers(0, 2)) if copies > 1 else None
    begun = {unit: train(config, unit, copies, ordered, dies) for unit in (size, WHOLE)}
    assert same(begun[size], begun[WHOLE])
    ended = [train(config, unit, copies, ordered, None, begun[other]) for unit, other in ((size, WHOLE), (WHOLE, size))]
    assert same(*ended) and not same(ended[0], begun[size])


def train(config, size, copies, ordered, dies, resumed=None):
    """Trains three steps of the workers of a stage, each of which holds `copies` thirds of the units. Returns their
    checkpoint.

    dies     step before which worker 1 dies; None: it does not die
    resumed  checkpoint to start from; None: the initial state
    """
    peers = [0, 1, 2]
    stages = [cut(Stage(config, 0, CPU), size) for _ in peers]
    optimizers = [StageOptimizer(config, stage, whole=False) for stage in stages]
    layout, lacking = stages[0].layout, []
    sizes = dict(zip(layout.ids, layout.unit_sizes, strict=True))
    table = placed(sizes, peers, copies)
    for peer in peers:
        if resumed is not None:
            optimizers[peer].resume(lambda names: {name: resumed[name] for name in names})
        for unit in held(table, peer):
            optimizers[peer].begin(unit)
        optimizers[peer].settled()
    for step in range(3):
        if step == dies:
            peers.remove(1)
            left = {unit: [peer for peer in holders if peer != 1] for unit, holders in table.items()}
            table = refilled(left, sizes, peers, copies)
            lacking = missing(left, table, sizes)
        shares = Shares.of(table, False, lacking, None)
        network = Network({peer: Worker(peer, 0) for peer in peers}, ordered)

        def work(peer, step=step, shares=shares, network=network):
            stage, optimizer = stages[peer], optimizers[peer]
            exchange = Exchange(network.links(peer), stage, optimizer, peer, lambda pending, giver=None: pending.wait())
            exchange.copies(shares, lambda unit: None)
            add(stage, step, peers.index(peer), len(peers))
            reduced = exchange.sum_gradients(shares, peers, lambda: None)
            if not reduced.fits:
                stage.gradients.begin_again(1, reduced)
                add(stage, step, peers.index(peer), len(peers))
                reduced = exchange.sum_gradients(shares, peers, lambda: None)
            assert reduced.fits and sorted(reduced.units) == held(shares.holders, peer)
            optimizer.step(reduced, step, 0.7)
            exchange.weights(shares, peers, known=False)
            stage.gradients.clear()
            live = {memory(stage.working[span]) for span in layout.spans}
            received = {memory(room) for room in network.rooms[peer]}
            assert not received & live, "the rest of a message may arrive steps later"

        with ThreadPoolExecutor(len(peers)) as pool:
            list(pool.map(work, peers))
        lacking = []
    assert all(torch.equal(stages[peer].working.joined(), stages[0].working.joined()) for peer in peers)
    with TemporaryDirectory() as folder:
        parts = []
        for peer in peers:
            mine = [unit for unit, holders in enumerate(table.values()) if holders[0] == peer]
            state = pieces(optimizers[peer], stages[peer], mine)
            parts.append(checkpoint.Saver(folder).save(3, peer, state, tensors_of(stages[peer])).result())
        return checkpoint.load(checkpoint.finish(folder, 3, parts, {}))


def memory(tensor):
    return tensor.untyped_storage().data_ptr()


def held(table, peer):
    """The numbers of a worker's units."""
    return [unit for unit, holders in enumerate(table.values()) if peer in holders]


def add(stage, step, place, count):
    """Adds gradients of every `count`-th micro-batch from number `place` on. They depend on the step and the number."""
    for g in range(place, stage.microbatches, count):
        random = torch.Generator().manual_seed(100 * step + g)
        for name, shape in zip(stage.names, stage.layout.shapes, strict=True):
            stage.gradients.add(name, torch.randn(shape, generator=random))
        stage.gradients.close(g, 1.0)
