"""Decides whether layers move to another layout: the time that a move gains, against the time that it costs.

    move = Move(now=0.54, then=0.47, outage=900.0, seconds=0.4, back=True)
    move.gain, move.cost                       # seconds of training
    move.pays("auto")                          # schedule.rebalance

    outages = Outages(default=900.0)           # schedule.outage
    outages.observe(dead, now)                 # after each step: the workers that do not take part
    outages.expected(now, soon)                # expected seconds until the next of them is back

The gain counts until the next worker is back, because then another layout is better. If a worker is away, the layers
move back afterwards, so the move is paid for twice.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Set
from dataclasses import dataclass

from recycle_schedules import Worker

MARGIN = 1.5  # auto moves only if the gain is this multiple of the cost
ROUNDING = 1e-6  # share of a step; always moves if the new plan is shorter by more
LEAST = 0.02  # the same for auto; measured times are not more exact
SLOWED = 0.03  # share by which steps take longer while layers are sent
SWITCH = 0.05  # stall of a switch in seconds, before one was measured
BANDWIDTH = 1e9  # bytes per second between two workers, before a link was measured
START = 20.0  # least expected seconds until a starting process takes part, if no outage was longer than this one
REMEMBERED = 100  # outages


@dataclass(frozen=True)
class Move:
    """A move that could be made now.

    now, then  planned seconds of a step in the present layout, and in the new one
    outage     expected seconds until the membership changes again
    seconds    expected time from now to the switch
    back       whether the layers will move back
    switch     expected stall of the switch, in seconds
    slowed     share by which steps take longer while layers are sent
    """

    now: float
    then: float
    outage: float
    seconds: float = 0.0
    back: bool = False
    switch: float = SWITCH
    slowed: float = SLOWED

    @property
    def steps(self) -> float:
        """Steps in the new layout, counted at the present pace."""
        return max(0.0, self.outage - self.seconds) / self.now

    @property
    def gain(self) -> float:
        """Seconds of training that the new layout saves during the outage."""
        return (self.now - self.then) * self.steps

    @property
    def cost(self) -> float:
        """Seconds of training that the move costs, with the move back."""
        return (1 + self.back) * (self.slowed * self.seconds + self.switch)

    def pays(self, mode: str) -> bool:
        """Whether to move. mode: the setting `schedule.rebalance`."""
        least = {"never": math.inf, "always": ROUNDING, "auto": LEAST}[mode]
        return self.now - self.then > least * self.now and (mode == "always" or self.gain > MARGIN * self.cost)


class Outages:
    """The history of the workers' outages, and what it says about the present ones."""

    def __init__(self, default: float) -> None:
        """default: expected seconds of an outage that is longer than all before."""
        self._default = default
        self._since: float | None = None  # first observation
        self._away: dict[Worker, float] = {}  # dead worker -> time at which it was first observed
        self._past: deque[float] = deque(maxlen=REMEMBERED)  # seconds of each past outage
        self._count = 0

    def observe(self, dead: Set[Worker], now: float) -> None:
        """dead: the workers that do not take part. now: seconds of any clock that does not jump."""
        if self._since is None:
            self._since = now
        for worker in sorted(self._away.keys() - dead):
            self._past.append(now - self._away.pop(worker))
        for worker in dead - self._away.keys():
            self._away[worker] = now
            self._count += 1

    def expected(self, now: float, soon: Collection[Worker] = ()) -> float:
        """Expected seconds until the next dead worker is back. If all take part: until the next outage, infinity if
        there was none.

        soon: dead workers with a process that is starting
        """
        if self._away:
            return 1 / sum(1 / self._left(worker, now, worker in soon) for worker in self._away)
        assert self._since is not None, "observe comes first"
        return (now - self._since) / self._count if self._count else math.inf

    def _left(self, worker: Worker, now: float, soon: bool) -> float:
        """Expected seconds until this worker is back: the mean rest of all longer outages."""
        age = now - self._away[worker]
        longer = [seconds - age for seconds in self._past if seconds > age]
        if longer:
            return sum(longer) / len(longer)
        return max(START, age) if soon else self._default
