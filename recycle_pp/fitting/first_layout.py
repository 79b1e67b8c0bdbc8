"""model.split=auto: the boundaries between stages at the start, from numbers of weights and bytes.

    settings.with_values({"model.auto_split": first_layout(settings)})   # before any worker starts

An embedding or a head with a large vocabulary counts as a part of the first or of the last layer. A layer's work is its
number of weights, without the embedding, which needs no multiplication. The head's weights can be as many as those of
several layers. With `parallel.memory` the layers and the micro-batches in flight must fit. Nothing is measured: when
the job has measured its times, `schedule.rebalance` may move the layers.
"""

from __future__ import annotations

import sys

from recycle_schedules.bounds import LayoutBounds
from recycle_schedules.op_kinds import SPLIT

from recycle_pp.config.settings import Settings
from recycle_pp.model.memory import parameters
from recycle_pp.model.split import layers_of

from .layout_search import layered
from .model_layers import ModelLayers
from .problem import initial_problem

ENOUGH = 1.02
"""A layout is good enough if the lower bound of its step is at most this multiple of the best layout's bound."""


def first_layout(settings: Settings) -> list[int] | None:
    """The number of layers of each stage; None for numbers as equal as possible. A pure function; takes milliseconds.

    Returns None with emulated compute, whose ops take their stage's share of the layers, and with a model that is not
    the project's own, because building it is the only way to know its weights. Returns None and prints a sentence if no
    layout fits.
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
        print(
            "model.split=auto: no layout leaves every stage room for its layers and one micro-batch; stages have equal "
            "numbers of layers",
            file=sys.stderr,
        )
        return None
    even = tuple(map(len, layers_of(model.layers, stages)))
    return None if bounds.of(even) <= ENOUGH * bounds.best else list(bounds.layout(ENOUGH))


def work(settings: Settings) -> list[float]:
    """The work of each layer of the project's own Transformer: (L,), in weights that multiply."""
    model = settings.model
    assert isinstance(model.layers, int)
    counts = [float(parameters(model, range(k, k + 1))) for k in range(model.layers)]
    counts[0] -= model.vocabulary * model.width
    return counts
