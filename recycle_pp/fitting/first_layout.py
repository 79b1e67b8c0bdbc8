"""Chooses the first boundaries between the stages of a job with model.split=auto.

    settings = with_first_layout(settings)               # before any worker starts
    counted(problem, settings)                           # a problem without measured times, for `plan`

The work of a layer is estimated as its number of weights. The head counts as part of the last layer, and can have as
many weights as several layers. The embedding needs no multiplication, so only its bytes count, as part of the first
layer. With `parallel.memory` the layers and the micro-batches in flight must fit. Once the job has measured its times,
`schedule.rebalance` may move layers.
"""

from __future__ import annotations

import sys

from recycle_schedules import Problem
from recycle_schedules.bounds import LayoutBounds
from recycle_schedules.op_kinds import SPLIT

from recycle_pp.config.settings import Settings
from recycle_pp.model.memory import parameters
from recycle_pp.model.split import layers_of

from .layer_values import by_stage
from .layout_search import layered
from .model_layers import ModelLayers
from .problem import initial_problem

ENOUGH = 1.02
"""A layout is good enough if the lower bound of its step is at most this multiple of the best layout's bound."""


def with_first_layout(settings: Settings) -> Settings:
    """The settings of a job at its start. With `model.split=auto` they include the first layout.

    Prints a sentence if no layout fits. Stages then have equal numbers of layers.
    """
    if settings.model.split != "auto":
        return settings
    try:
        chosen = first_layout(settings)
    except ValueError as error:
        print(error, file=sys.stderr)
        chosen = None
    return settings.with_values({"model.auto_split": chosen})


def first_layout(settings: Settings) -> list[int] | None:
    """The number of layers of each stage; None to make them as equal as possible. Takes milliseconds.

    Returns None

    - if equal numbers are nearly as fast (`ENOUGH`);
    - with emulated compute, in which the time of an op depends only on its stage's number of layers;
    - for a model that is not the project's own, whose weights are unknown until it is built.

    Raises ValueError if no layout fits into `parallel.memory`.
    """
    model, stages = settings.model, settings.parallel.stages
    if settings.emulate.mode or not model.own or stages == 1:
        return None
    assert isinstance(model.layers, int)
    problem = initial_problem(settings).replace(backward=settings.schedule.backward)
    problem = layered(problem, dict.fromkeys(SPLIT, work(settings)), ModelLayers(settings))
    try:
        bounds = LayoutBounds(problem)
    except ValueError:
        raise ValueError(
            "model.split=auto: no layout leaves every stage room for its layers and one micro-batch; stages get equal "
            "numbers of layers"
        ) from None
    even = tuple(map(len, layers_of(model.layers, stages)))
    return None if bounds.of(even) <= ENOUGH * bounds.best else list(bounds.layout(ENOUGH))


def work(settings: Settings) -> list[float]:
    """The work of each of the L layers of the project's own Transformer: its number of weights that multiply."""
    model = settings.model
    assert isinstance(model.layers, int)
    counts = [float(parameters(model, range(k, k + 1))) for k in range(model.layers)]
    counts[0] -= model.vocabulary * model.width
    return counts


def counted(problem: Problem, settings: Settings) -> Problem:
    """A copy of the problem with durations of F, I and W in proportion to the work of each stage. Their means stay the
    same.

    Returns the problem unchanged if compute is emulated, or if the weights of the model's layers are unknown.
    """
    if settings.emulate.mode or not settings.model.own:
        return problem
    each = work(settings)
    mean = sum(each) / problem.stages
    shares = [stage / mean for stage in by_stage(each, ModelLayers(settings).start)]
    times = problem.replace(memory=None).per_stage
    scaled = {kind: [time * share for time, share in zip(times(kind), shares, strict=True)] for kind in SPLIT}
    return problem.replace(durations={**problem.durations, **scaled})
