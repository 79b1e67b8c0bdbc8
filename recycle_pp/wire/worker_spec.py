"""What a worker is told by its supervisor, and its last words: lines of JSON through inherited pipes.

    spec = WorkerSpec.read(prepare)         # in the worker: the first line on its standard input, unless that is an
                                            # `Ahead` for one that stands by: then prepare(ahead), and the next one
    for place in told_later(): ...          # blocks: CoordinatorAt, where it is now; ends with the supervisor
    last_words(spec, cause="exception", detail=traceback.format_exc())

The token is in the spec, so it appears neither on a command line nor in an environment.
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

_LONGEST_WORDS = 4000  # bytes; a pipe takes a write of at most 4096 as a whole


@dataclass
class WorkerSpec:
    """All that a worker needs to begin."""

    host: str  # of the coordinator
    port: int
    token: str
    rank: int  # pipeline * stages + stage
    incarnation: int  # how many times this rank was started before
    run_dir: str
    settings: dict[str, Any]
    last_words: int = -1  # descriptor of a pipe to the supervisor
    lifeline: int = -1  # descriptor of what tells the supervisor of its death

    @classmethod
    def read(cls, prepare: Callable[[Ahead], None] = lambda ahead: None) -> WorkerSpec:
        """In a worker: the first lines that the supervisor wrote to its standard input."""
        while True:
            line = _standard_input().readline()
            try:
                return msgspec.json.decode(line, type=cls)
            except msgspec.ValidationError:
                prepare(msgspec.json.decode(line, type=Ahead))


class Ahead(msgspec.Struct, forbid_unknown_fields=True):
    """What a process that stands by for a worker is told before there is a spec."""

    settings: dict[str, Any]


class LastWords(msgspec.Struct, frozen=True):
    """Why a worker is about to die.

    cause, detail  "exception", "out_of_memory" or "gpu" and the traceback (the end is kept), or "injected" and the
                   fault, right before it is injected
    where, mistake see `Death`
    at             time.monotonic()
    """

    cause: str
    detail: str
    at: float
    where: str = ""
    mistake: str = ""


def told_later() -> Iterator[CoordinatorAt]:
    """In a worker: what its supervisor says after the spec; blocks, and ends with the supervisor."""
    for line in _standard_input():
        yield msgspec.json.decode(line, type=CoordinatorAt)


@functools.cache
def _standard_input() -> BinaryIO:
    return open(0, "rb", closefd=False)  # not sys.stdin, which a forked worker has from its parent


def last_words(spec: WorkerSpec, cause: str, detail: str, where: str = "", mistake: str = "") -> None:
    """Tells the supervisor why this worker is about to die (see LastWords); never raises."""
    for longest in (3000, 1000, 300):  # the bytes of foreign letters make a line longer than its text
        line = msgspec.json.encode(LastWords(cause, detail[-longest:], time.monotonic(), where, mistake)) + b"\n"
        if len(line) <= _LONGEST_WORDS:
            break
    with suppress(OSError):
        os.write(spec.last_words, line)
