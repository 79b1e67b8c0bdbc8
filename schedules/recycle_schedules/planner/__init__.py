"""Makes plans.

from recycle_schedules.planner import plan, plans
best = plan(problem)                     # good, in milliseconds
for candidate in plans(problem): ...     # ever better ones, for as long as the caller likes
"""

from .planner import plan, plans

__all__ = ["plan", "plans"]
