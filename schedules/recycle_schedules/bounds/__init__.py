"""Says what no valid plan can beat.

from recycle_schedules.bounds import lower_bound
lower_bound(problem)                     # of Plan.value, in the problem's unit
"""

from .bounds import lower_bound, steady_bounds

__all__ = ["lower_bound", "steady_bounds"]
