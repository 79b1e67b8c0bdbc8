"""The valid lines of a run folder's .jsonl files.

    terms = Terms()
    terms.counts(record.get("term", EARLIER))      # for each line, in the order of the file
    without_undone(records, step=...)              # one line per step: for metrics.jsonl and samples.jsonl

Each line carries the term of the coordinator that wrote it. After a network cut, a replaced coordinator may still
append to a shared file, until it learns about its successor. So a line is valid only if no earlier line has a newer
term. A line of step k invalidates earlier lines of step k and later steps, because the job went back to an earlier
state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

EARLIER = -1  # term of lines without one, written by earlier versions

R = TypeVar("R")


class Terms:
    """newest: newest term so far."""

    def __init__(self) -> None:
        self.newest = EARLIER

    def counts(self, term: int) -> bool:
        """Whether a line of this term is valid. Call it once for each line, in order."""
        self.newest = max(self.newest, term)
        return term == self.newest


def without_undone(records: Iterable[R], step: Callable[[R], int]) -> list[R]:
    """The records of steps that were not repeated later, in the order of their steps. step: the step of a record."""
    kept: list[R] = []
    for record in records:
        while kept and step(kept[-1]) >= step(record):
            kept.pop()
        kept.append(record)
    return kept
