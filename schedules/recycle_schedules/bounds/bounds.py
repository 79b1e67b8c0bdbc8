"""A lower bound of `Plan.value`: lower_bound(problem), whatever the problem is of.

Of whole steps with given stages (`stage_bounds.py`), of all layouts of a problem with layers (`layout_bound.py`), of
what is left of a broken step (`remainder_bound.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from ..problem import Problem
from .layout_bound import LayoutBounds
from .remainder_bound import remainder_bound
from .stage_bounds import stage_bound


def lower_bound(problem: Problem, limits: Sequence[float] | None = None) -> float:
    """A value, in the problem's unit, that no valid plan's `value` is below; of no layout, if it gives layers.

    limits (P,): most micro-batches in flight at each stage of a whole step, instead of the problem's own limits."""
    if problem.layers is not None:
        return LayoutBounds(problem).best
    return remainder_bound(problem) if problem.remainder else stage_bound(problem, limits)
