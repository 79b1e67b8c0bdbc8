"""A parameter that several stages hold: all of them end with the sum over them, whatever each has of it."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from recycle_pp.numerics import torch_operations as ops
from recycle_pp.numerics.gradients import Gradients, Reduced
from recycle_pp.numerics.layout import Layout
from recycle_pp.numerics.ties import Ties

CPU = torch.device("cpu")
SHAPES = {"tied": (3, 5), "also": (7,)}


class Stages:
    """Three stages: `tied` on all, `also` on the outer two; `own` on each."""

    def __init__(self, reproducible):
        shared = {"tied": [0, 1, 2], "also": [0, 2]}
        self.gradients, self.layouts, self.ties = [], [], []
        for stage in range(3):
            held = {name: of for name, of in shared.items() if stage in of}
            layout = Layout({"own": (4,)} | {name: SHAPES[name] for name in held})
            gradients = Gradients(layout, 2, CPU, reproducible=reproducible, ops=ops, shared=list(held))
            self.gradients.append(gradients)
            self.layouts.append(layout)
            self.ties.append(Ties(gradients, layout, stage, held, ops))

    def united(self):
        reduced = [gradients.reduced(gradients.payload()) for gradients in self.gradients]
        return [self.of(stage, reduced) for stage in range(3)]

    def of(self, stage, reduced):
        parcels = {}
        for other in self.ties[stage].stages:
            parcels[other] = self.ties[stage].room(other).copy_(self.ties[other].parcel(reduced[other], to=stage))
        return self.ties[stage].united(reduced[stage], parcels)

    def gradient(self, stage, reduced, name):
        layout = self.layouts[stage]
        return layout.views(reduced.flat)[layout.names.index(name)]


@given(st.booleans(), st.integers(0, 1000))
def test_every_stage_holds_the_sum_over_the_stages(reproducible, seed):
    random, stages = torch.Generator().manual_seed(seed), Stages(reproducible)
    exact = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for gradients in stages.gradients:
        for g in range(2):
            for name in gradients.names:
                grad = torch.randn(SHAPES.get(name, (4,)), generator=random)
                gradients.add(name, grad)
                if name in exact:
                    exact[name] += grad.double()
            gradients.close(g, None)
    united = stages.united()
    for name, holders in (("tied", (0, 1, 2)), ("also", (0, 2))):
        found = [stages.gradient(stage, united[stage], name) for stage in holders]
        assert all(torch.equal(found[0], other) for other in found)
        assert torch.allclose(found[0].double(), exact[name], atol=1e-5)
        squares = [united[stage].squares[stages.gradients[stage].names.index(name)] for stage in holders]  # one block
        assert squares[0] > 0 and not any(squares[1:]), "the norm counts it once"


def test_uniting_again_after_a_death_changes_no_bit():
    stages = Stages(True)
    for gradients in stages.gradients:
        for name in gradients.names:
            gradients.add(name, torch.randn(SHAPES.get(name, (4,))))
    reduced = [gradients.reduced(gradients.payload()) for gradients in stages.gradients]
    first = stages.of(0, reduced)
    before = first.flat.clone()
    copied = Reduced.from_tensors([tensor.clone() for tensor in first.to_tensors()])
    for again in (first, copied):  # of this worker, or of a peer that took its sums over
        assert torch.equal(stages.of(0, [again, *reduced[1:]]).flat, before)


def test_what_is_not_finite_on_one_stage_is_not_on_any():
    """Else the stages would give the parameter different exponents for the next step."""
    stages = Stages(True)
    for gradients in stages.gradients:
        for name in gradients.names:
            gradients.add(name, torch.ones(SHAPES.get(name, (4,))))
    stages.gradients[1].add("own", torch.full((4,), float("nan")))
    for gradients in stages.gradients:
        gradients.close(0, None)
    assert [reduced.finite for reduced in stages.united()] == [False] * 3
