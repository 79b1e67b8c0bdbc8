"""Says why this process ends, to a person and to the launcher.

    return refuse("run.stepz is no key of the configuration; did you mean run.steps?", launch.local_rank)   # 2
    record_failure("stage 2 has lost its last worker")           # what has been printed already

torchrun shows in its summary what a process leaves in the file that TORCHELASTIC_ERROR_FILE names, as
`torch.distributed.elastic.multiprocessing.errors.record` writes it. It is written by hand here, as supervisors do
without torch.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress

SILENT_SECONDS = 20.0  # for the launcher to end this rank because its node's first one has failed


def refuse(sentence: str, local_rank: int = 0) -> int:
    """Exit code 2, for a mistake of the user that all ranks of a node meet: its first one prints and records it.

    The others block until the launcher ends them, so that one rank speaks and its summary shows one failure; where
    nothing comes in `SILENT_SECONDS` they speak, too.
    """
    if local_rank > 0:
        time.sleep(SILENT_SECONDS)
    fail(sentence)
    return 2


def fail(sentence: str) -> None:
    """Prints the sentence, as the last line of this process, and records it."""
    sys.stdout.flush()
    print(f"recycle_pp: {sentence}", file=sys.stderr, flush=True)
    record_failure(sentence)


def record_failure(sentence: str) -> None:
    """For torchrun's summary. Without torchrun, or where the file cannot be written, nothing happens."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        error = {"message": {"message": sentence, "extraInfo": {"timestamp": str(int(time.time()))}}}
        with suppress(OSError), open(path, "w") as file:
            json.dump(error, file)
