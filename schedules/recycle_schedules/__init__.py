"""Plans for a pipeline-parallel step on any set of live workers.

    from recycle_schedules import Problem, Worker, actions, plan

    best = plan(Problem(pipelines=3, stages=4, microbatches=6, failed=[Worker(1, 2)]))
    todo = actions(best)[Worker(0, 2)]

Inputs and outputs are plain data. The package does not import torch. `plan` and `plan_layout` are imported on first
use, because they need numba.
"""

from typing import TYPE_CHECKING, Any

from .actions import Action, Actions, actions, unpack
from .memory import StageMemory
from .op_kinds import KINDS, OpKind, TensorKind
from .ops import Done, MicroBatch, Op, Tensor, Worker
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
    "OpKind",
    "Plan",
    "Problem",
    "Progress",
    "StageMemory",
    "Tensor",
    "TensorKind",
    "Trace",
    "Worker",
    "actions",
    "load",
    "plan",
    "plan_layout",
    "unpack",
]


def __getattr__(name: str) -> Any:
    """Import the planner on first use, so that importing the data types stays cheap."""
    if name in ("plan", "plan_layout"):
        from . import planner

        globals()[name] = getattr(planner, name)
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
