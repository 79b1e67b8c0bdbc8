"""Which lines of a run folder's .jsonl files count.

    terms = Terms()
    terms.counts(record.get("term", EARLIER))      # for each line, in the order of the file
    without_undone(records, step=...)              # one line a step: for metrics.jsonl and samples.jsonl

Each line carries the term of the coordinator that wrote it. After a cut network, the coordinator that was replaced may
append to a shared file for a while, because it does not know its successor yet. So a line counts only if no line before
it has a newer term. A line of step k means that earlier lines of step k and later ones are undone: the job went back to
an earlier state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

EARLIER = -1  # the term of lines without one, which earlier versions wrote

R = TypeVar("R")


class Terms:
    """newest: the newest term so far."""

    def __init__(self) -> None:
        self.newest = EARLIER

    def counts(self, term: int) -> bool:
        """Whether a line of this term counts, after all lines before it were asked for."""
        self.newest = max(self.newest, term)
        return term == self.newest


def without_undone(records: Iterable[R], step: Callable[[R], int]) -> list[R]:
    """The records whose step was not run again, in the order of their steps. step: of a record."""
    kept: list[R] = []
    for record in records:
        while kept and step(kept[-1]) >= step(record):
            kept.pop()
        kept.append(record)
    return kept
