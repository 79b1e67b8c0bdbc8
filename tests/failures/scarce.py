"""Workers that may not take more memory than SCARCE bytes above what they hold once they are built (RLIMIT_DATA).

Allocations beyond that fail as they do on a machine that has no more: torch raises, the worker says so and dies.
SCARCE_WORKERS names whom, like 1.0; none: all.
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
