"""Runs in a zygote (see Zygote.preload): the workers of its jobs fail where RECYCLE_SABOTAGE says.

RECYCLE_SABOTAGE='{"raise": "ValueError", "stage": 1, "step": 3, "g": 5, "once": "/tmp/flag"}'
RECYCLE_SABOTAGE='{"foreign": "/tmp/flag", "after": 4}'      # the fifth worker to start has another platform
RECYCLE_SABOTAGE='{"compile": 2.5}'    # so many seconds in C++, with Python's lock, before a worker is ready
RECYCLE_SABOTAGE='{"clock": 3600}'     # time.time() jumps that far to and fro, everywhere

`once`: a file that the first failure makes; where it is there already, nothing fails. Without it, every peer fails.
"""

import ctypes
import json
import os
import time

import torch

from recycle_pp.execution import worker
from recycle_pp.model.stage import Stage

_forward, _platform, _time = Stage.forward, worker.platform, time.time


def sabotage():
    return json.loads(os.environ.get("RECYCLE_SABOTAGE", "{}"))


def forward(self, step, g, *arguments):
    now = sabotage()
    if "raise" in now and (now["stage"], now["step"], now["g"]) == (self.stage, step, g) and _first(now.get("once")):
        raise {"ValueError": ValueError, "OutOfMemoryError": torch.OutOfMemoryError}[now["raise"]]("sabotaged")
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
    now = sabotage()
    ctypes.PyDLL(None).usleep(int(1e6 * now.get("compile", 0)))
    same = "foreign" not in now or any(_first(f"{now['foreign']}.{n}") for n in range(now["after"]))
    return _platform(*arguments) if same else "another GPU"


def jumping_time():
    return _time() + sabotage().get("clock", 0) * (int(time.monotonic() * 20) % 3 - 1)


Stage.forward, worker.platform, time.time = forward, platform, jumping_time
