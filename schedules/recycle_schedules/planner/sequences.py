"""A schedule as one sequence of ops per worker. Local search changes the sequences; retiming keeps them.

q = Sequences.of(instance, schedule, room)
q.earliest(instance)               # every op as early as possible
q.latest(instance, deadline)       # every op as late as possible before the deadlines
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..compiled import LOOPS
from .instance import Instance
from .partial_schedule import PartialSchedule


@dataclass(eq=False)
class Sequences:
    """A sequence of ops for each worker. Worker w runs codes[first[w] : first[w] + length[w]] in this order. Entries
    between sequences are unused."""

    host: np.ndarray  # (n,): worker of each node
    first: np.ndarray  # (w,) int64
    length: np.ndarray  # (w,) int64
    codes: np.ndarray  # int64
    starts: np.ndarray  # int64, aligned with codes
    order: np.ndarray  # int64: indices into codes, in topological order

    @classmethod
    def of(cls, x: Instance, schedule: PartialSchedule, room: np.ndarray | int = 0) -> Sequences:
        """The sequences of a schedule. room (w,): number of ops by which each sequence may grow."""
        worker = schedule.host[schedule.codes >> 2]
        length = np.bincount(worker, minlength=len(x.cap)).astype(np.int64)
        size = length + room
        first = np.cumsum(size) - size
        by_worker = np.argsort(worker, kind="stable")
        codes = np.zeros(int(size.sum()) + 1, dtype=np.int64)
        within = np.arange(len(worker)) - np.repeat(np.cumsum(length) - length, length)
        codes[np.repeat(first, length) + within] = schedule.codes[by_worker]
        return cls(schedule.host.copy(), first, length, codes, np.empty_like(codes), np.empty_like(codes))

    def earliest(self, x: Instance, release: np.ndarray | None = None) -> PartialSchedule:
        """The schedule with every op as early as its worker and its inputs allow.

        release (w,): the times at which the workers become free. Default: `x.release`."""
        placed = LOOPS.earliest(
            x.stages, self.host, x.todo, x.sent, x.duration, x.release if release is None else release, x.travel,
            self.first, self.length, self.codes, self.starts, self.order,
        )  # fmt: skip
        assert placed == self.length.sum(), "sequences wait for each other"
        at = self.order[:placed]
        return PartialSchedule(self.codes[at], self.starts[at], self.host)

    def latest(self, x: Instance, deadline: np.ndarray) -> PartialSchedule:
        """The schedule with every op as late as possible, such that worker w ends by deadline[w]. Call `earliest`
        first: it computes the order."""
        placed = int(self.length.sum())
        LOOPS.latest(
            x.stages, self.host, x.todo, x.sent, x.duration, x.travel, self.codes, self.order, placed,
            deadline, self.starts,
        )  # fmt: skip
        at = self.order[:placed]
        return PartialSchedule(self.codes[at], self.starts[at], self.host)
