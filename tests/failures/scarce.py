"""Limits a worker's memory to SCARCE bytes more than it uses once its model is built (RLIMIT_DATA).

Allocations beyond the limit fail as on a machine without free memory: torch raises an exception, which the worker
reports before it dies. SCARCE_WORKERS: names of the limited workers, such as 1.0; default: all.
"""

import os
import resource

from recycle_pp.execution.executor import Executor
from recycle_pp.linux.processes import memory_of

_run = Executor.run


def run(self):
    me = self.session.participant.worker
    if f"{me.pipeline}.{me.stage}" in os.environ.get("SCARCE_WORKERS", f"{me.pipeline}.{me.stage}"):
        limit = memory_of("VmData") + int(os.environ["SCARCE"])
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    return _run(self)


Executor.run = run
