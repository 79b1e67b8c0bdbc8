"""Decides which lines of a run folder's .jsonl files are valid.

    terms = Terms()
    terms.counts(record.get("term", EARLIER))      # for each line, in the order of the file
    without_undone(records, step=...)              # at most one record per step, for metrics.jsonl and samples.jsonl

Each line contains the term of the coordinator that wrote it, a number that grows with each new coordinator. After a
network cut, a replaced coordinator may still append to a shared file until it learns about its successor. So a line is
valid only if no earlier line has a larger term.

A line about step k invalidates all earlier lines about step k or a later step, because the job has gone back to an
earlier state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

EARLIER = -1  # the term of a line that has none; earlier versions wrote such lines

R = TypeVar("R")


class Terms:
    """The terms of a file's lines. newest: the largest term so far."""

    def __init__(self) -> None:
        self.newest = EARLIER

    def counts(self, term: int) -> bool:
        """Whether a line of this term is valid. Call it once for each line, in order."""
        self.newest = max(self.newest, term)
        return term == self.newest


def without_undone(records: Iterable[R], step: Callable[[R], int], newest: int | None = None) -> list[R]:
    """The valid records. A record about a step invalidates all earlier records about this step or a later step.

    step(record): the step that a record is about
    newest:       keeps at most this number of records, the last ones; None: all
    """
    kept: deque[R] = deque(maxlen=newest)
    for record in records:
        while kept and step(kept[-1]) >= step(record):
            kept.pop()
        kept.append(record)
    return list(kept)
