"""Lower bounds on `Plan.value`.

from recycle_schedules.bounds import lower_bound
lower_bound(problem)                     # in the problem's unit
"""

from .bounds import lower_bound
from .layout_bound import LayoutBounds
from .stage_bounds import steady_bounds

__all__ = ["LayoutBounds", "lower_bound", "steady_bounds"]
