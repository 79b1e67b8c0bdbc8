"""Runs in a zygote (see Zygote.preload): the model of its jobs fails where RECYCLE_SABOTAGE says.

RECYCLE_SABOTAGE='{"raise": "ValueError", "stage": 1, "step": 3, "g": 5, "once": "/tmp/flag"}'

`once`: a file that the first failure makes; where it is there already, nothing fails. Without it, every peer fails.
"""

import json
import os

import torch

from recycle_pp.model.stage import Stage

_forward = Stage.forward


def forward(self, step, g, *arguments):
    plan = json.loads(os.environ.get("RECYCLE_SABOTAGE", "null"))
    if plan and (plan["stage"], plan["step"], plan["g"]) == (self.stage, step, g) and _first(plan.get("once")):
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


Stage.forward = forward
