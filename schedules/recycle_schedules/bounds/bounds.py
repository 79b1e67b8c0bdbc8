"""lower_bound(problem), a lower bound of `Plan.value` for any problem.

Whole steps with fixed stages: `stage_bounds.py`. All layouts of a problem with layers: `layout_bound.py`. The remainder
of a broken step: `remainder_bound.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..problem import Problem
from .layout_bound import LayoutBounds
from .remainder_bound import remainder_bound
from .stage_bounds import stage_bound


def lower_bound(problem: Problem, limits: Sequence[float] | None = None) -> float:
    """A lower bound of the `value` of every valid plan, in the problem's unit. If the problem gives layers, it covers
    all layouts.

    limits: for a whole step, (P,) most micro-batches in flight at each stage, instead of the problem's own limits."""
    if problem.layers is not None:
        return LayoutBounds(problem).best
    return remainder_bound(problem) if problem.remainder else stage_bound(problem, limits)
