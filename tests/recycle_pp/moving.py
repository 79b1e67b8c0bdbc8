"""A pipeline in this process whose layers move between its stages while it trains."""

from dataclasses import replace

import torch

from recycle_pp.data.batches import Batches
from recycle_pp.model.split import layers_of
from recycle_pp.model.stage import Stage
from recycle_pp.numerics.optimizer import StageOptimizer
from recycle_pp.protocol.commit import clip_scale

from .in_process import CPU, backward, forward, part, reduce_alone
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
        """Trains a step. Layers that move follow it. Returns its loss and norm."""
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
        """Layers begin to follow, from their state after step `newest`, to the stages that will have them."""
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
        """The layers of a stage in the new layout; its ends do not move."""
        depth, now = stage.module.depth, [*stage.layout.layers]
        mine = layers_of(depth, len(self.split), self.split)[stage.stage]
        return [k for k in now if k < 0] + [*mine] + [k for k in now if k >= depth]

    def switch(self):
        for stage, optimizer in zip(self.stages, self.optimizers, strict=True):
            arriving = [self.coming.pop(stage.stage)] if stage.stage in self.coming else []
            stage.relayout(self.layers(stage), [of.tensors for of in arriving])
            optimizer.relayout(arriving)

    def state(self):
        """All tensors of the state by name, with the weights and the checksums."""
        found = {}
        for stage, optimizer in zip(self.stages, self.optimizers, strict=True):
            for unit, name in enumerate(stage.layout.unit_names):
                for kind, vector in zip(("model", "mean", "square"), optimizer.vectors(unit), strict=True):
                    found[f"{kind} {name}"] = vector.clone()
                held = optimizer.held[unit]
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
    """Trains both pipelines, while layers of one of them move: there and back, by one stage or two, one or two at a
    time. Asserts that both have the same bits. way: (new split, number of steps that its layers follow) of each move"""
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


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
