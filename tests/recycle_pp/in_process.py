"""A pipeline whose stages are all in this process, for tests of their results."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from recycle_pp.config.settings import Settings
from recycle_pp.data.batches import Batches
from recycle_pp.model.stage import Stage
from recycle_pp.numerics.gradients import Reduced
from recycle_pp.numerics.optimizer import StageOptimizer
from recycle_pp.numerics.ties import Ties
from recycle_pp.protocol.ballot import clip_scale

CPU = torch.device("cpu")


def small(**changes: object) -> Settings:
    """Settings of a model that trains in milliseconds: one pipeline, two stages. changes: `group__key=value`."""
    defaults: dict[str, object] = {
        "model__layers": 3, "model__width": 24, "model__heads": 4, "model__kv_heads": 2, "model__ffn": 40,
        "model__sequence": 16, "parallel__pipelines": 1, "parallel__stages": 2, "parallel__microbatches": 4,
        "run__steps": 10, "optimizer__warmup": 2,
    }  # fmt: skip
    return Settings().with_values({path.replace("__", "."): value for path, value in (defaults | changes).items()})


def pipeline(settings: Settings) -> list[Stage]:
    return [Stage(settings, stage, CPU) for stage in range(settings.parallel.stages)]


def forward(stages: Sequence[Stage], batches: Batches, step: int, g: int) -> Tensor:
    """Runs F of every stage. Returns the loss."""
    batch, boundary = batches.batch(step, g).of_step(batches.items(step)), []
    for stage in stages:
        boundary = stage.forward(step, g, batch, boundary)
    return boundary[0]


def backward(stages: Sequence[Stage], g: int, *, split: bool = False) -> None:
    """Runs B of every stage, or I and then W."""
    grads = []
    for stage in reversed(stages):
        grads = stage.backward_input(g, grads) if split else stage.backward(g, grads)
    if split:
        for stage in stages:
            stage.backward_weight(g)


def sums(stage: Stage) -> dict[str, Tensor]:
    """The sums in the stage's accumulators, by name."""
    flat = stage.gradients.payload()[0]
    return dict(zip(stage.names, stage.layout.views(flat), strict=True))


def reduce_alone(stages: Sequence[Stage]) -> list[Reduced]:
    """The reduced gradients of stages without peers. Units in several stages are summed over these stages."""
    alone = [stage.gradients.reduced(stage.gradients.payload()) for stage in stages]
    return summed_over_stages([Ties(stage.gradients, stage.stage, stage.module.shared) for stage in stages], alone)


def summed_over_stages(
    ties: Sequence[Ties], alone: Sequence[Reduced], exponents: Sequence[Tensor] | None = None
) -> list[Reduced]:
    """The gradients of each stage after the stages (one worker each) have exchanged their tied units.

    exponents: exponents of each stage's sums; None: the current ones
    """
    found = []
    of_sums = exponents or [here.gradients.exponents for here in ties]
    for here, own, e in zip(ties, alone, of_sums, strict=True):
        parcels = []
        for stage, (there, other) in enumerate(zip(ties, alone, strict=True)):
            mine = [unit for unit in here.units if stage in here.stages(unit)]
            if there is not here and mine:
                theirs = [unit for unit in there.units if here.stage in there.stages(unit)]
                parcels.append((stage, mine, there.parcel(other, there.units, theirs)))
        found.append(here.counted_once(here.summed(own, here.units, parcels, e)) if here.units else own)
    return found


def train(settings: Settings, steps: int, order: Iterable[int] | None = None) -> tuple[list[tuple[float, float]], dict]:
    """Trains. Returns (mean loss, gradient norm) of each step, and the weights by name.

    order: numbers of the micro-batches, in the order in which they run
    """
    stages, batches = pipeline(settings), Batches(settings)
    optimizers = [StageOptimizer(settings, stage) for stage in stages]
    order = list(order or range(stages[0].microbatches))
    history = []
    for step in range(steps):
        for g in order:
            forward(stages, batches, step, g)
            backward(stages, g, split=g % 2 == 0)
        reduced = reduce_alone(stages)
        norm, scale = clip_scale([square for r in reduced for square in r.squares], settings.optimizer.clip)
        for stage, optimizer, gradient in zip(stages, optimizers, reduced, strict=True):
            optimizer.step(gradient, step, scale)
            stage.gradients.clear()
        history.append((sum(reduced[-1].losses.tolist()) / len(order), norm))
    return history, {name: p.detach() for stage in stages for name, p in stage.parameters.items()}


def gradient(stage: Stage, step: int, units: Sequence[int] | None = None) -> Reduced:
    """A random reduced gradient, zero in the gaps between tensors. units: only these; None: all."""
    flat = stage.layout.vector(CPU)
    random = torch.Generator().manual_seed(step)
    for view in stage.layout.views(flat):
        view.normal_(generator=random)
    G = stage.microbatches
    whole = Reduced(flat, torch.ones(G, dtype=torch.int64), torch.ones(G, dtype=torch.float64), [], True)
    return whole if units is None else part(stage, whole, units)


def part(stage: Stage, whole: Reduced, units: Sequence[int]) -> Reduced:
    """The part of a reduced gradient that the holder of these units receives."""
    grads, largest = stage.gradients.grads(whole), None
    if stage.gradients.reproducible:
        largest = torch.cat([stage.gradients.largest_of(unit, grad) for unit, grad in grads.items()])
    return replace(whole, flat=torch.cat([grads[unit] for unit in units]), units=tuple(units), largest=largest)


def everything(optimizer: StageOptimizer) -> dict[str, torch.Tensor]:
    """A copy of the optimizer's whole state."""
    return {name: tensor.clone() for name, tensor in optimizer.state().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
