"""Runs in a zygote (see Zygote.preload): the workers of its jobs fail where RECYCLE_SABOTAGE says.

RECYCLE_SABOTAGE='{"raise": "ValueError", "stage": 1, "step": 3, "g": 5, "once": "/tmp/flag"}'
RECYCLE_SABOTAGE='{"foreign": "/tmp/flag", "after": 4}'      # the fifth worker to start has another platform

`once`: a file that the first failure makes; where it is there already, nothing fails. Without it, every peer fails.
"""

import json
import os

import torch

from recycle_pp.execution import worker
from recycle_pp.model.stage import Stage

_forward, _platform = Stage.forward, worker.platform


def forward(self, step, g, *arguments):
    plan = json.loads(os.environ.get("RECYCLE_SABOTAGE", "null"))
    if (
        plan
        and "raise" in plan
        and (plan["stage"], plan["step"], plan["g"]) == (self.stage, step, g)
        and _first(plan.get("once"))
    ):
        raise {"ValueError": ValueError, "OutOfMemoryError": torch.OutOfMemoryError}[plan["raise"]]("sabotaged")
    return _forward(self, step, g, *arguments)


def _first(flag):
    if flag is None:
        return True
    try:
        os.close(os.open(flag, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def platform(*arguments):
    plan = json.loads(os.environ.get("RECYCLE_SABOTAGE", "null"))
    same = not plan or "foreign" not in plan or any(_first(f"{plan['foreign']}.{n}") for n in range(plan["after"]))
    return _platform(*arguments) if same else "another GPU"


Stage.forward = forward
worker.platform = platform
