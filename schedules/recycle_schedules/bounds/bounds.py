"""lower_bound(problem), a lower bound on `Plan.value` for any problem.

`stage_bounds.py` bounds whole steps with fixed stages, `layout_bound.py` all layouts of a problem with layers, and
`remainder_bound.py` the remainder of a broken step.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..problem import Problem
from .layout_bound import LayoutBounds
from .remainder_bound import remainder_bound
from .stage_bounds import stage_bound


def lower_bound(problem: Problem, limits: Sequence[float] | None = None) -> float:
    """A lower bound on the `value` of every valid plan, in the problem's unit. If the problem gives layers, the bound
    covers all layouts.

    limits (P,): maximum number of micro-batches in flight at each stage, instead of the problem's limits. Only for a
    whole step."""
    if problem.layers is not None:
        return LayoutBounds(problem).best
    return remainder_bound(problem) if problem.remainder else stage_bound(problem, limits)
