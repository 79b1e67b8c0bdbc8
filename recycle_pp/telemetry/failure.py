"""Reports why this process ends, to the user and to the launcher.

    return refuse("run.stepz is not a configuration key; did you mean run.steps?", launch.local_rank)   # 2
    record_failure("stage 2 has lost its last worker")           # after the sentence was printed elsewhere

torchrun's summary shows the content of the file named by TORCHELASTIC_ERROR_FILE. This module writes the format of
`torch.distributed.elastic.multiprocessing.errors.record`, because supervisors cannot import torch.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress

SILENT_SECONDS = 20.0  # time for the launcher to end the other ranks of a node after one has failed


def refuse(sentence: str, local_rank: int = 0) -> int:
    """Reports a user's mistake that stops all ranks of a node, and returns exit code 2.

    Only the first rank reports it. The others block until the launcher ends them, so that its summary shows one
    failure. If they still run after `SILENT_SECONDS`, they report the mistake too.
    """
    if local_rank > 0:
        time.sleep(SILENT_SECONDS)
    fail(sentence)
    return 2


def fail(sentence: str) -> None:
    """Prints the sentence as the last line of this process and records it."""
    with suppress(OSError):  # the reader of standard output has exited
        sys.stdout.flush()
    with suppress(OSError):
        print(f"recycle_pp: {sentence}", file=sys.stderr, flush=True)
    record_failure(sentence)


def record_failure(sentence: str) -> None:
    """Adds the sentence to torchrun's summary. Does nothing without torchrun, or if the file cannot be written."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        error = {"message": {"message": sentence, "extraInfo": {"timestamp": str(int(time.time()))}}}
        with suppress(OSError), open(path, "w") as file:
            json.dump(error, file)
