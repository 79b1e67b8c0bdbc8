"""Makes plans.

from recycle_schedules.planner import plan, plans
best = plan(problem)                     # good, in milliseconds
for candidate in plans(problem): ...     # ever better ones, for as long as the caller likes
best = plan_layout(problem)              # of a problem with layers: the boundaries between stages, too
"""

from .layouts import layout_plans, plan_layout, plan_rerouted
from .planner import plan, plans

__all__ = ["layout_plans", "plan", "plan_layout", "plan_rerouted", "plans"]
