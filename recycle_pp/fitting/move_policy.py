"""Decides whether moving layers to another layout saves more training time than it costs.

    move = Move(now=0.54, then=0.47, outage=900.0, seconds=0.4, back=True)
    move.gain, move.cost                       # seconds of training
    move.pays("auto")                          # schedule.rebalance

    outages = Outages(default=900.0)           # schedule.outage
    outages.observe(dead, now)                 # after each step; dead: the workers that do not take part
    outages.expected(now, soon)                # expected seconds until the first dead worker is back
    outages.to_json(), outages.load(data, now)                 # for another coordinator

The gain ends when the first dead worker is back, because a different layout is then best. The cost of a move after a
death counts twice, because the layers move back later.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Set
from dataclasses import dataclass
from time import time

from recycle_schedules import Worker

from recycle_pp.wire.records import OutageRecord

MARGIN = 1.5  # auto moves only if the gain is this multiple of the cost
ROUNDING = 1e-6  # with rebalance=always, the new plan must be shorter by more than this share of a step
LEAST = 0.02  # the same share with rebalance=auto, because measured times are not more exact than this
SLOWED = 0.03  # share by which steps take longer while layers are sent
SWITCH = 0.05  # stall of a switch in seconds, before one was measured
BANDWIDTH = 1e9  # bytes per second between two workers, before a link was measured
START = 20.0  # minimum estimate of the seconds until a starting process takes part, if no past outage lasted longer
REMEMBERED = 100  # number of past outages that count


@dataclass(frozen=True)
class Move:
    """A move that could be made now.

    now      planned seconds of a step in the present layout
    then     planned seconds of a step in the new layout
    outage   expected seconds until the membership changes again
    seconds  expected seconds until the layers have been sent and the job switches to the new layout
    back     whether the layers will move back
    switch   expected stall of the switch, in seconds
    slowed   share by which steps take longer while layers are sent
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
        """Number of steps in the new layout, estimated with the present duration of a step."""
        return max(0.0, self.outage - self.seconds) / self.now

    @property
    def gain(self) -> float:
        """Seconds of training that the new layout saves during the outage."""
        return (self.now - self.then) * self.steps

    @property
    def cost(self) -> float:
        """Seconds of training that the move costs, and the move back if there will be one."""
        return (1 + self.back) * (self.slowed * self.seconds + self.switch)

    def pays(self, mode: str) -> bool:
        """Whether to move. mode: the setting `schedule.rebalance`."""
        least = {"never": math.inf, "always": ROUNDING, "auto": LEAST}[mode]
        return self.now - self.then > least * self.now and (mode == "always" or self.gain > MARGIN * self.cost)


class Outages:
    """The history of the workers' outages, from which the rest of the present outages is estimated."""

    def __init__(self, default: float) -> None:
        """default: expected remaining seconds of an outage that is already longer than all earlier ones."""
        self._default = default
        self._since: float | None = None  # time of the first observation
        self._now = 0.0  # time of the last observation
        self._away: dict[Worker, float] = {}  # dead worker -> time at which it was first observed as dead
        self._past: deque[float] = deque(maxlen=REMEMBERED)  # seconds of each past outage
        self._count = 0  # number of outages, past and present

    def observe(self, dead: Set[Worker], now: float) -> bool:
        """Records the dead workers. Returns whether a worker died or came back since the last call.

        dead  the workers that do not take part
        now   seconds of a monotonic clock
        """
        self._now = now
        if self._since is None:
            self._since = now
        changed = self._away.keys() != dead
        for worker in sorted(self._away.keys() - dead):
            self._past.append(now - self._away.pop(worker))
        for worker in dead - self._away.keys():
            self._away[worker] = now
            self._count += 1
        return changed

    def to_json(self) -> OutageRecord:
        """The history up to the last call of `observe`, for `load`."""
        return {
            "time": time(),
            "observed_seconds": 0.0 if self._since is None else self._now - self._since,
            "count": self._count,
            "past_seconds": [*self._past],
            "away_seconds": {str(worker): self._now - since for worker, since in self._away.items()},
        }

    def load(self, data: OutageRecord, now: float) -> None:
        """Continues the history from another coordinator's `to_json`. now: as for `observe`."""
        written = now - max(0.0, time() - data["time"])
        self._since, self._now, self._count = written - data["observed_seconds"], now, data["count"]
        self._past.extend(data["past_seconds"])
        self._away = {Worker.parse(name): written - seconds for name, seconds in data["away_seconds"].items()}

    def expected(self, now: float, soon: Collection[Worker] = ()) -> float:
        """Expected seconds until the first of the dead workers is back.

        If all workers take part, returns the expected seconds until the next outage; infinity if there has been none
        yet.

        soon: dead workers with a process that is starting
        """
        if self._away:
            return 1 / sum(1 / self._left(worker, now, worker in soon) for worker in self._away)
        assert self._since is not None, "observe comes first"
        return (now - self._since) / self._count if self._count else math.inf

    def _left(self, worker: Worker, now: float, soon: bool) -> float:
        """Expected seconds until this worker is back.

        The estimate is the mean time by which those past outages that exceed the present one exceed it. If there are
        none, the estimate is the default or, for a starting process (`soon`), the seconds that this outage has lasted,
        at least `START`.
        """
        age = now - self._away[worker]
        longer = [seconds - age for seconds in self._past if seconds > age]
        if longer:
            return sum(longer) / len(longer)
        return max(START, age) if soon else self._default
