"""Lines of JSON through inherited pipes: a supervisor's messages to its worker, and the worker's last words.

    spec = WorkerSpec.read(prepare)         # in the worker, from its standard input. A standby process receives `Ahead`
                                            # first, and calls prepare(ahead) before it waits for the spec
    for place in later_addresses(): ...     # yields each new address of the coordinator; ends with the supervisor
    last_words(spec, cause="exception", detail=traceback.format_exc())

The job's token is part of the spec, so it appears neither on a command line nor in an environment.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, BinaryIO

import msgspec

from .messages.supervisors import CoordinatorAt

_LONGEST_WORDS = 4000  # bytes; a write of at most 4096 bytes to a pipe is atomic


@dataclass
class WorkerSpec:
    """The parameters of a worker process."""

    host: str  # address of the coordinator
    port: int
    token: str
    job_id: str
    rank: int  # number of the member; at the start of a job, pipeline * stages + stage of its worker
    incarnation: int  # number of earlier starts of this rank
    run_dir: str
    settings: dict[str, Any]
    last_words: int = -1  # descriptor of the pipe for last words to the supervisor
    lifeline: int = -1  # descriptor through which the supervisor detects the worker's death

    @classmethod
    def read(cls, prepare: Callable[[Ahead], None] = lambda ahead: None) -> WorkerSpec:
        """The spec that the supervisor wrote to this process's standard input. Blocks until it arrives."""
        while True:
            line = _standard_input().readline()
            try:
                return msgspec.json.decode(line, type=cls)
            except msgspec.ValidationError:
                prepare(msgspec.json.decode(line, type=Ahead))


class Ahead(msgspec.Struct, forbid_unknown_fields=True):
    """Sent to a standby process before its spec, so that it can read the data in advance."""

    settings: dict[str, Any]


class LastWords(msgspec.Struct, frozen=True):
    """The reason why a worker is about to die.

    cause           "exception", "out_of_memory" or "gpu"; "injected" is sent just before an injected fault
    detail          the end of the traceback; for "injected", the fault
    where, mistake  see `Death`
    at              time.monotonic() when the words were sent
    """

    cause: str
    detail: str
    at: float
    where: str = ""
    mistake: str = ""


def later_addresses() -> Iterator[CoordinatorAt]:
    """In a worker, yields each message that the supervisor sends after the spec. Blocks until the next one arrives.
    Ends when the supervisor ends."""
    for line in _standard_input():
        yield msgspec.json.decode(line, type=CoordinatorAt)


@functools.cache
def _standard_input() -> BinaryIO:
    return open(0, "rb", closefd=False)  # not sys.stdin, which a forked worker shares with its parent


def last_words(spec: WorkerSpec, cause: str, detail: str, where: str = "", mistake: str = "") -> None:
    """Sends the reason for this worker's death to the supervisor (see LastWords). Never raises."""
    for longest in (3000, 1000, 300):  # characters; non-ASCII letters take more than one byte each
        line = msgspec.json.encode(LastWords(cause, detail[-longest:], time.monotonic(), where, mistake)) + b"\n"
        if len(line) <= _LONGEST_WORDS:
            break
    with suppress(OSError):
        os.write(spec.last_words, line)
