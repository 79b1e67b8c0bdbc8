"""A simulated run: time passes, steps are done, time is lost to causes; a policy decides what happens.

    outcome = simulate(policy, there, job)       # policies: see policies/
    outcome.relative, outcome.shares["recovering"], outcome.curve

A policy gets the `Run` and is told of every change. It says at which pace the job goes on, that all stand still for a
while, that work is thrown away, or that it wants to be called later.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from .availability import Availability
from .job import Job
from .step_times import Key

CAUSES = ("away", "idle", "recovering", "checkpoints", "redone", "schedule")
"""Where workers' time goes that is no useful work: machines that are not there; that are there and take no part (they
start, are sent the state, stand by, or wait for others); everybody standing still after a change; while checkpoints are
written; work that was thrown away; bubbles, uneven loads and redundant work."""


class Policy(Protocol):
    """What somebody does about losses. The class's docstring says who, and where that is published."""

    name: str

    def begin(self, run: Run) -> None:
        """Set the first pace. `run.up` are the machines that are there."""

    def lost(self, machine: int) -> None: ...

    def gained(self, machine: int) -> None: ...


@dataclass
class Outcome:
    """steps and seconds are floats, since steps go on at the end. relative: to fault-free 1F1B all the time."""

    policy: str
    seconds: float
    steps: float
    relative: float
    shares: dict[str, float]  # of D x P workers' time, by cause, and "work"; they add up to 1
    redone: float  # steps that were done and lost
    changes: int
    curve: list[tuple[float, float, int]] = field(repr=False)  # from when on: pace in fault-free 1F1B's, machines up
    spent: dict[Key, float] = field(repr=False)  # seconds by membership, for `StepTimes.plan`
    note: str = ""


class Run:
    """The state of one simulation; `up` and `now` are for policies to read."""

    def __init__(self, there: Availability, job: Job, reference: float) -> None:
        self.there, self.job, self.reference = there, job, reference
        self.up = set(range(there.machines)) - there.absent
        self.now = 0.0
        self.done = 0.0
        self.redone = 0.0
        self.curve: list[tuple[float, float, int]] = []
        self.spent: dict[Key, float] = defaultdict(float)
        self._pace, self._used, self._saving = 0.0, 0, 0.0
        self._key: Key | None = None
        self._until = 0.0  # all stand still
        self._time = dict.fromkeys(CAUSES, 0.0)
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    # ---- for policies

    def go_on(
        self, seconds: float | None, used: int, key: Key | None = None, *, batch: float = 1.0, saving: float = 0.0
    ) -> None:
        """From now on a step takes so long; None: nothing is done. used: workers that take part. batch: the share of a
        step's micro-batches that one has. saving: share of the time in which checkpoints hold it up."""
        self._pace = 0.0 if seconds is None else batch / seconds
        self._used, self._key, self._saving = used, key, saving

    def stand_still(self, seconds: float) -> None:
        """Everybody, from now on or after what they stand still for already."""
        self._until = max(self._until, self.now) + seconds

    def drop_step(self, batch: float = 1.0) -> None:
        """The step that is under way, half of it on average, unless all stand still."""
        if self._until <= self.now and self._pace:
            self.throw_away(batch / 2)

    def throw_away(self, steps: float) -> None:
        steps = min(steps, self.done)
        self.done -= steps
        self.redone += steps

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._later, (self.now + seconds, next(self._numbers), call))

    @property
    def pace(self) -> float:
        """Steps a second, while nobody stands still."""
        return self._pace * (1 - self._saving)

    # ---- the loop

    def play(self, policy: Policy) -> Outcome:
        policy.begin(self)
        self._note()
        for change in self.there.changes:
            self._advance(change.at)
            (self.up.add if change.up else self.up.discard)(change.machine)
            (policy.gained if change.up else policy.lost)(change.machine)
            self._note()
        self._advance(self.there.seconds)
        return self._outcome(policy)

    def _advance(self, to: float) -> None:
        while self._later and self._later[0][0] <= to:
            at, _, call = heapq.heappop(self._later)
            self._pass(at)
            call()
            self._note()
        self._pass(to)

    def _pass(self, to: float) -> None:
        """Time goes by in which nothing changes but that a stand-still may end."""
        workers = self.job.workers
        live = min(len(self.up), workers)
        used = min(self._used, live)
        length, still = to - self.now, min(max(0.0, self._until - self.now), to - self.now)
        going = length - still
        self._time["away"] += (workers - live) * length
        self._time["idle"] += (live - used) * length
        self._time["recovering"] += used * still
        if self._pace:
            self._time["checkpoints"] += used * going * self._saving
            self.done += self.pace * going
            if self._key is not None:
                self.spent[self._key] += going
        else:
            self._time["idle"] += used * going
        self.now = to
        if still and going:
            self.curve.append((to - going, self.pace * self.reference, len(self.up)))

    def _note(self) -> None:
        """A point of the curve, in place of one of the same moment."""
        if self.curve and self.curve[-1][0] == self.now:
            self.curve.pop()
        still = self._until > self.now
        self.curve.append((self.now, 0.0 if still else self.pace * self.reference, len(self.up)))

    def _outcome(self, policy: Policy) -> Outcome:
        whole = self.job.workers * self.there.seconds
        work = self.done * self.job.work
        self._time["redone"] = self.redone * self.job.work
        rest = whole - work - sum(self._time.values())
        shares = {"work": work / whole} | {cause: t / whole for cause, t in self._time.items()}
        shares["schedule"] = rest / whole
        return Outcome(
            policy.name, self.there.seconds, self.done, self.done * self.reference / self.there.seconds, shares,
            self.redone, len(self.there.changes), self.curve, dict(self.spent),
        )  # fmt: skip


def simulate(policy: Policy, there: Availability, job: Job, reference: float) -> Outcome:
    """What the job gets done in that time. reference: seconds of a fault-free step of 1F1B."""
    return Run(there, job, reference).play(policy)
