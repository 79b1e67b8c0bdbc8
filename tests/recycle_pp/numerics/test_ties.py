"""All stages of a tied parameter get the sum over these stages."""

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from recycle_pp.numerics import torch_operations as ops
from recycle_pp.numerics.gradients import Gradients, Reduced
from recycle_pp.numerics.layout import Layout
from recycle_pp.numerics.ties import Ties

from ..in_process import summed_over_stages

CPU = torch.device("cpu")
SHAPES = {"tied": (3, 5), "also": (7,)}


class Stages:
    """Three stages: `tied` in all, `also` in the first and last, `own` in each."""

    def __init__(self, reproducible):
        shared = {"tied": [0, 1, 2], "also": [0, 2]}
        self.gradients, self.ties = [], []
        for stage in range(3):
            held = {name: of for name, of in shared.items() if stage in of}
            layout = Layout({"own": (4,)} | {name: SHAPES[name] for name in held}, lambda *_: None)
            gradients = Gradients(layout, 2, CPU, reproducible=reproducible, ops=ops, shared=list(held))
            self.gradients.append(gradients)
            self.ties.append(Ties(gradients, stage, held))

    def reduced(self):
        return [gradients.reduced(gradients.payload()) for gradients in self.gradients]

    def gradient(self, stage, reduced, name):
        layout = self.gradients[stage].layout
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
    found_by_stage = summed_over_stages(stages.ties, stages.reduced())
    for name, holders in (("tied", (0, 1, 2)), ("also", (0, 2))):
        found = [stages.gradient(stage, found_by_stage[stage], name) for stage in holders]
        assert all(torch.equal(found[0], other) for other in found)
        assert torch.allclose(found[0].double(), exact[name], atol=1e-5)
        squares = [found_by_stage[stage].squares[stages.gradients[stage].names.index(name)] for stage in holders]
        assert squares[0] > 0 and not any(squares[1:]), "the norm counts the tied parameter once"


def test_adding_the_stages_sums_again_after_a_death_changes_no_bit():
    stages = Stages(True)
    for gradients in stages.gradients:
        for name in gradients.names:
            gradients.add(name, torch.randn(SHAPES.get(name, (4,))))
    reduced = stages.reduced()
    first = summed_over_stages(stages.ties, reduced)[0]
    before = first.flat.clone()
    copied = Reduced.from_tensors([tensor.clone() for tensor in first.to_tensors()])
    for again in (first, copied):  # this worker's own, or copied from a peer
        once_more = summed_over_stages(stages.ties, [again, *reduced[1:]])[0]
        assert torch.equal(once_more.flat, before) and once_more.squares == first.squares


def test_adding_the_stages_sums_again_after_an_early_update_changes_no_bit():
    """`gradients` then has the exponents of the next step."""
    stages = Stages(True)
    for gradients in stages.gradients:
        for name in gradients.names:
            gradients.add(name, torch.randn(SHAPES.get(name, (4,))) / 1000)
    reduced = stages.reduced()
    found = summed_over_stages(stages.ties, reduced)
    exponents = [gradients.exponents for gradients in stages.gradients]
    before = [each.flat.clone() for each in found]
    for gradients, each in zip(stages.gradients, found, strict=True):
        gradients.follow(each)
        assert not torch.equal(gradients.exponents, exponents[0])
    again = summed_over_stages(stages.ties, found, exponents)
    assert all(torch.equal(each.flat, flat) for each, flat in zip(again, before, strict=True))
    assert [each.squares for each in again] == [each.squares for each in found]


def test_a_gradient_that_is_not_finite_in_one_stage_counts_as_not_finite_in_all():
    """Otherwise the stages would derive different exponents for the next step."""
    stages = Stages(True)
    for gradients in stages.gradients:
        for name in gradients.names:
            gradients.add(name, torch.ones(SHAPES.get(name, (4,))))
    stages.gradients[1].add("own", torch.full((4,), float("nan")))
    for gradients in stages.gradients:
        gradients.close(0, None)
    assert [reduced.finite for reduced in summed_over_stages(stages.ties, stages.reduced())] == [False] * 3


def test_summing_some_or_all_tied_units_gives_the_same_bits():
    stages = Stages(True)
    for gradients in stages.gradients:
        for name in gradients.names:
            gradients.add(name, torch.randn(SHAPES.get(name, (4,))))
    reduced = stages.reduced()
    every = summed_over_stages(stages.ties, reduced)[0]
    here = stages.ties[0]
    for unit in here.units:
        own = here.own(reduced[0], here.units)[unit]
        alone = replace(reduced[0], shared=own)
        parcels = [
            (stage, [unit], stages.ties[stage].parcel(reduced[stage], stages.ties[stage].units, [theirs]))
            for stage in here.stages(unit)[1:]
            for theirs in stages.ties[stage].units
            if stages.gradients[stage].layout.unit_names[theirs] == here.gradients.layout.unit_names[unit]
        ]
        found = here.summed(alone, [unit], parcels, here.gradients.exponents)
        assert torch.equal(stages.gradients[0].grads(found)[unit], stages.gradients[0].grads(every)[unit])
        assert found.squares[unit] == every.squares[unit]
