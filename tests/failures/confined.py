"""Workers that are each in a memory control group of their own (cgroup v1), with CONFINED bytes and no more.

A worker makes its group below CONFINED_IN, and enters it, before it builds anything; the kernel kills it if it takes
more. What it had as it was forked, most of Python and torch, is charged to whom it was forked from.
"""

import os
from pathlib import Path

from recycle_pp.execution.worker import Process

_run = Process.run


def run(self):
    if "CONFINED" in os.environ:
        group = Path(os.environ["CONFINED_IN"]) / str(os.getpid())
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(os.environ["CONFINED"])
        (group / "cgroup.procs").write_text(str(os.getpid()))
    return _run(self)


Process.run = run
