"""A pipeline in this process, whose layers move between its stages while it trains."""

from dataclasses import replace

import torch

from recycle_pp.data.batches import Batches
from recycle_pp.model.split import layers_of
from recycle_pp.model.stage import Stage
from recycle_pp.numerics.optimizer import StageOptimizer
from recycle_pp.protocol.ballot import clip_scale

from .in_process import CPU, backward, forward, gradient, part, reduce_alone
from .numerics.test_units import cut


class Pipeline:
    """A pipeline in this process. split: number of layers of each stage. size: maximum size of a unit."""

    def __init__(self, config, split, whole=True, size=2048):
        self.config = config.with_values({"parallel.stages": len(split), "model.split": split})
        self.whole, self.coming = whole, {}
        self.stages = [cut(Stage(self.config, s, CPU), size) for s in range(len(split))]
        self.optimizers = [StageOptimizer(self.config, stage, whole) for stage in self.stages]
        for stage, optimizer in zip(self.stages, self.optimizers, strict=True):
            for unit in () if whole else range(len(stage.layout.units)):
                optimizer.begin(unit)
            optimizer.settled()
        self.batches = Batches(self.config)

    def step(self, number):
        """Trains a step and updates the copies of moving layers. Returns its loss and norm."""
        for g in range(self.stages[0].microbatches):
            forward(self.stages, self.batches, number, g)
            backward(self.stages, g, split=g % 2 == 0)
        reduced = reduce_alone(self.stages)
        norm, scale = clip_scale([square for r in reduced for square in r.squares], self.config.optimizer.clip)
        for stage, optimizer, of in zip(self.stages, self.optimizers, reduced, strict=True):
            own = of if self.whole else part(stage, of, range(len(stage.layout.units)))
            optimizer.step(own, number, scale)
            stage.gradients.clear()
        for arriving in self.coming.values():
            layout, found = arriving.tensors.layout, {}
            for stage, of in zip(self.stages, reduced, strict=True):
                found |= {stage.layout.ids[unit]: grad for unit, grad in stage.gradients.grads(of).items()}
            grad = torch.cat([found[unit] for unit in layout.ids])
            arriving.follow(replace(reduced[0], flat=grad, units=tuple(range(len(layout.ids)))), number, scale)
            self._give_exponents(arriving)
        return sum(reduced[-1].losses.tolist()), norm

    def begin(self, split, newest):
        """Begins a move to `split`: receivers copy their new layers' state after step `newest`."""
        self.split = split
        for stage, optimizer in zip(self.stages, self.optimizers, strict=True):
            gains = [layer for layer in self.layers(stage) if layer not in stage.layout.layers]
            if gains:
                arriving = self.coming[stage.stage] = optimizer.beside(stage.arriving(gains))
                for of, donor in zip(self.stages, self.optimizers, strict=True):
                    if units := [unit for unit in arriving.tensors.layout.ids if unit.layer in of.layout.layers]:
                        numbers = [arriving.tensors.layout.number(unit) for unit in units]
                        arriving.take(numbers, donor.copy(units, newest))
                self._give_exponents(arriving)

    def layers(self, stage):
        """The layers of a stage in the new layout. The embedding and the head do not move."""
        depth, now = stage.module.depth, [*stage.layout.layers]
        mine = layers_of(depth, len(self.split), self.split)[stage.stage]
        return [k for k in now if k < 0] + [*mine] + [k for k in now if k >= depth]

    def switch(self):
        for stage, optimizer in zip(self.stages, self.optimizers, strict=True):
            arriving = [self.coming.pop(stage.stage)] if stage.stage in self.coming else []
            stage.relayout(self.layers(stage), [of.tensors for of in arriving])
            optimizer.relayout(arriving)

    def take_over(self, other, understudy, to, newest):
        """In the middle of a step, stage `understudy` of the pipeline `other` becomes stage `to` of this one."""
        stage, optimizer = other.stages[understudy], other.optimizers[understudy]
        arrived = optimizer.beside(stage.arriving([*self.stages[to].layout.layers]))
        ids = arrived.tensors.layout.ids
        arrived.take(range(len(ids)), self.optimizers[to].copy(ids, newest))
        self._give_exponents(arrived)
        stage.take_over(to, arrived.tensors)
        optimizer.take_over(arrived)
        self.stages[to], self.optimizers[to] = stage, optimizer

    def state(self):
        """All tensors of the state by name, with the weights and the checksums."""
        found = {}
        for stage, optimizer in zip(self.stages, self.optimizers, strict=True):
            for unit, name in enumerate(stage.layout.unit_names):
                held = optimizer.held[unit]
                for kind, vector in zip(held.names, optimizer.vectors(unit), strict=True):
                    found[f"{kind} {name}"] = vector.clone()
                found[f"checksum {name}"] = held.checksum()
                if held.seal is not None:
                    found[f"seal {name}"] = held.seal.clone()
            found |= {name: of.clone() for name, of in optimizer.exponents().items()}
            found |= {name: of.detach().clone() for name, of in stage.parameters.items()}
        return found

    def _give_exponents(self, arriving):
        for stage in self.stages:
            arriving.tensors.gradients.take_exponents_of_layers(stage.gradients.exponents_of_layers())


MOVES = (([1, 2, 2], 2), ([3, 1, 1], 0), ([1, 1, 3], 1), ([2, 2, 1], 1))


def moves(moving, still, way=MOVES):
    """Trains both pipelines while layers of `moving` move. Asserts that both have the same bits after each move.

    way: for each move, (new split, number of steps from its start to its switch). By default, one or two layers
    move there and back, by one or two stages.
    """
    done = 0

    def steps(count):
        nonlocal done
        for _ in range(count):
            assert moving.step(done) == still.step(done)
            done += 1

    steps(2)
    for split, count in way:
        moving.begin(split, newest=done - 1)
        steps(count)
        moving.switch()
        assert [sum(0 <= k < stage.module.depth for k in stage.layout.layers) for stage in moving.stages] == split
        assert same(moving.state(), still.state())
    steps(1)
    assert same(moving.state(), still.state())


def takes_over(pipelines, understudy, to):
    """During a step, stage `understudy` of the first of three equal pipelines becomes stage `to` of the second.

    Asserts that the second pipeline then has the bits of the third.
    """
    first, second, third = pipelines
    for step in range(2):
        assert first.step(step) == second.step(step) == third.step(step)
    forward(first.stages, first.batches, 2, 0)
    backward(first.stages, 0, split=True)
    forward(first.stages, first.batches, 2, 1)
    if first.whole:
        optimizer = first.optimizers[understudy]
        optimizer.speculate(gradient(first.stages[understudy], 2), 2)
    second.take_over(first, understudy, to, newest=1)
    for step in range(2, 4):
        assert second.step(step) == third.step(step)
    assert same(second.state(), third.state())


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
