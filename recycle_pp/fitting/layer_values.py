"""Predicts a quantity of each stage, such as a duration, for different boundaries between the stages.

    by_layer([3.0, 2.0, 2.0, 3.5], (2, 2, 2, 2))               # [2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.5]
    relaid([3.0, 2.0, 2.0, 3.5], (2, 2, 2, 2), (1, 3, 2, 2))   # [2.0, 3.0, 2.0, 3.5]

A layout is the number of decoder layers of each stage (`recycle_schedules.layers`). The value of a stage is the sum of
the values of its decoder layers. The embedding stays at the first stage and the head at the last one. Their values are
estimated as the amounts by which these two stages exceed the usual value of their decoder layers. The amounts are added
to the first and the last layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from recycle_schedules.layers import Layout


def by_layer(values: Sequence[float], layout: Layout) -> list[float]:
    """The values of the L decoder layers. values: those of the P stages in this layout."""
    rates = [value / count for value, count in zip(values, layout, strict=True)]
    inner = rates[1:-1]
    usual = sum(inner) / len(inner) if inner else min(rates)
    extra = [max(0.0, values[s] - layout[s] * usual) for s in (0, -1)] if len(rates) > 1 else [0.0, 0.0]
    for s in (0, -1):
        rates[s] -= extra[s] / layout[s]
    each = [rate for rate, count in zip(rates, layout, strict=True) for _ in range(count)]
    each[0] += extra[0]
    each[-1] += extra[-1]
    return each


def by_stage(each: Sequence[float], layout: Layout) -> list[float]:
    """The values of the P stages. each: the values of the L decoder layers."""
    ends = accumulate(layout)
    return [math.fsum(each[end - count : end]) for end, count in zip(ends, layout, strict=True)]


def relaid(values: Sequence[float], before: Layout, after: Layout) -> list[float]:
    """The values of the P stages predicted for the layout `after` from those in the layout `before`."""
    return list(values) if before == after else by_stage(by_layer(values, before), after)
