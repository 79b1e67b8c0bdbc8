"""Confines each worker to its own memory control group (cgroup v1), with a limit of CONFINED bytes.

A worker creates its group below CONFINED_IN and enters it before it builds its model. If it exceeds the limit, the
kernel kills it. Memory that it shares with its parent since the fork (most of Python and torch) does not count.
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
