"""The planner.

from recycle_schedules.planner import plan, plans
best = plan(problem)                     # a good plan in milliseconds
for candidate in plans(problem): ...     # ever better plans, until the caller stops
best = plan_layout(problem)              # for a problem with `layers`: also chooses the stage boundaries
"""

from .layouts import layout_plans, plan_layout, plan_rerouted
from .planner import plan, plans

__all__ = ["layout_plans", "plan", "plan_layout", "plan_rerouted", "plans"]
