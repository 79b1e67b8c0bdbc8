"""Runs torchrun in this process, without torchrun's traceback after a failure.

    sys.exit(run_torchrun(["--nproc-per-node=4", "-m", "recycle_pp.train", "run.steps=60"]))

If a rank fails, the `torchrun` command prints the reason and then a traceback of thirty lines. This function prints the
reason last, and returns the exit code of the rank.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence


def run_torchrun(arguments: Sequence[str]) -> int:
    """Runs torchrun until all ranks have ended. Returns the exit code of the first rank that failed, or 0.

    arguments: the arguments of the `torchrun` command

    Imports torch, which takes seconds.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    try:
        run(parse_args(list(arguments)))
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        message = failure.message
        said = message.get("message", "") if isinstance(message, dict) else f"rank {rank}: {message}"
        print(f"recycle_pp: {said}", file=sys.stderr, flush=True)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as signalled:
        hung_up = signalled.sigval == signal.SIGHUP  # the ranks treat it as SIGTERM (`shutdown`)
        return 128 + (signal.SIGTERM if hung_up else int(signalled.sigval))
    return 0
