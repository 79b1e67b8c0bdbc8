"""Plans for a pipeline-parallel step on any set of live workers.

    from recycle_schedules import Problem, Worker, actions, plan

    best = plan(Problem(pipelines=3, stages=4, microbatches=6, failed=[Worker(1, 2)]))
    todo = actions(best)[Worker(0, 2)]

Plain data in and out; no torch. `plan`, `plan_layout` and what they need (numba) are imported when they are first used.
"""

from typing import TYPE_CHECKING, Any

from .actions import Action, Actions, actions, unpack
from .memory import StageMemory
from .ops import KINDS, Done, MicroBatch, Op, Tensor, Worker
from .plans import OpArrays, Plan
from .problem import Begun, Problem
from .progress import Progress
from .trace import Trace, load

if TYPE_CHECKING:
    from .planner import plan, plan_layout

__all__ = [
    "KINDS",
    "Action",
    "Actions",
    "Begun",
    "Done",
    "MicroBatch",
    "Op",
    "OpArrays",
    "Plan",
    "Problem",
    "Progress",
    "StageMemory",
    "Tensor",
    "Trace",
    "Worker",
    "actions",
    "load",
    "plan",
    "plan_layout",
    "unpack",
]


def __getattr__(name: str) -> Any:
    """Import the planner when it is first asked for: the data types alone stay light."""
    if name in ("plan", "plan_layout"):
        from . import planner

        globals()[name] = getattr(planner, name)
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
