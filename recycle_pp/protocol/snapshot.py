"""Saves the state of a job as bytes, and restores the job from them, for instance to replay its decisions.

    data = snapshot(job)
    job = restored(data, planner, derive)      # the same event has the same outcome on both

The bytes are a pickle, so a new attribute of the protocol's classes needs no change here. Plans are not saved, because
they are large and can be made again from their problems. `restored` accepts only values of the protocol's classes, so a
file cannot make it run other code.
"""

from __future__ import annotations

import io
import pickle
from enum import Enum
from typing import Any

from .adoption import Derive
from .job import Job
from .live_problem import LiveProblem
from .steady_state_plan import Planner, Steady

# Attributes of a job that are not saved: functions, plans and caches.
LEFT_OUT = ("planner", "derive", "steady", "_live_problem", "remainder_plans")
ROOMS = ("recycle_pp.protocol.", "recycle_pp.wire.messages.", "recycle_schedules.")
OTHERS = {("builtins", "set"), ("builtins", "frozenset")}


class NotASnapshot(ValueError):
    """The bytes are not a snapshot. The message is one sentence."""


def snapshot(job: Job) -> bytes:
    state = {name: value for name, value in vars(job).items() if name not in LEFT_OUT}
    data = io.BytesIO()
    _Pickler(data, protocol=5).dump((state, job.steady.state))
    return data.getvalue()


def restored(data: bytes, planner: Planner, derive: Derive) -> Job:
    """The job that `snapshot` has saved. planner, derive: see `Job`. Raises NotASnapshot if `data` is invalid."""
    try:
        state, steady = _Unpickler(io.BytesIO(data)).load()
        job = Job.__new__(Job)
        vars(job).update(state, planner=planner, derive=derive, _live_problem=LiveProblem(), remainder_plans={})
        job.steady = Steady(planner, job.evaluate_microbatches)
        job.steady.restore(steady)
    except Exception as error:  # damaged bytes can raise anything
        raise NotASnapshot(f"not a snapshot of a job: {error}") from error
    return job


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """Stores a member of an Enum by its value. Python 3.11.0 to 3.11.3 would call `getattr`, which `restored`
        rejects."""
        return (type(value), (value.value,)) if isinstance(value, Enum) else NotImplemented


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in OTHERS and not module.startswith(ROOMS):
            raise pickle.UnpicklingError(f"{module}.{name} is not part of a job")
        found = super().find_class(module, name)
        if not isinstance(found, type):
            raise pickle.UnpicklingError(f"{module}.{name} is not a class")
        return found
