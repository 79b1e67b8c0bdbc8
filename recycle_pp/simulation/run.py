"""A simulated run. The simulation advances time, counts steps and attributes lost time; a policy makes the decisions.

    outcome = Run(there, job, reference).play(policy)       # policies: see policies/
    outcome.relative, outcome.shares["recovering"], outcome.curve

A policy receives the `Run` and every change of machines. It sets the pace of the job, stalls it, discards work, or
schedules a call for later.
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
"""The causes of lost worker time:

away          machines that are down
idle          machines that are up but do not take part: they start, receive state, stand by, or wait
recovering    stalls of all workers after a change
checkpoints   writing checkpoints
redone        work that was discarded and has to be redone
schedule      bubbles, uneven loads and redundant work
"""


class Policy(Protocol):
    """A reaction to losses. The docstring of the class names the system and its publication."""

    name: str

    def begin(self, run: Run) -> None:
        """Sets the initial pace. `run.up`: the machines that are up."""

    def lost(self, machine: int) -> None: ...

    def gained(self, machine: int) -> None: ...


@dataclass
class Outcome:
    """The result of one policy. `steps` is a float, because the last step may be incomplete. `relative` is the
    throughput relative to fault-free 1F1B."""

    policy: str
    seconds: float
    steps: float
    relative: float
    shares: dict[str, float]  # the time of all D x P workers as shares that sum to 1: "work" and each of CAUSES
    redone: float  # steps that were completed and discarded
    changes: int
    # (time in seconds, pace after that time relative to fault-free 1F1B, number of machines that are up)
    curve: list[tuple[float, float, int]] = field(repr=False)
    spent: dict[Key, float] = field(repr=False)  # seconds by membership, for `StepTimes.plan`
    note: str = ""


class Run:
    """The state of one simulation. Policies read `up` and `now`."""

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
        self._until = 0.0  # end of the current stall
        self._time = dict.fromkeys(CAUSES, 0.0)
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    # ---- for policies

    def advance(
        self, seconds: float | None, used: int, key: Key | None = None, *, batch: float = 1.0, saving: float = 0.0
    ) -> None:
        """Sets the pace, starting now.

        seconds   duration of a step; None: no progress
        used      workers that take part
        batch     share of a full step's micro-batches in each step
        saving    share of the time spent on checkpoints
        """
        self._pace = 0.0 if seconds is None else batch / seconds
        self._used, self._key, self._saving = used, key, saving

    def stall(self, seconds: float) -> None:
        """Stalls all workers for `seconds`, from now on or from the end of the current stall."""
        self._until = max(self._until, self.now) + seconds

    def drop_step(self, batch: float = 1.0) -> None:
        """Discards the step in progress, on average half a step. Does nothing while the job is stalled.

        batch: share of a full step's micro-batches in this step"""
        if self._until <= self.now and self._pace:
            self.lose_steps(batch / 2)

    def lose_steps(self, steps: float) -> None:
        steps = min(steps, self.done)
        self.done -= steps
        self.redone += steps

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._later, (self.now + seconds, next(self._numbers), call))

    @property
    def pace(self) -> float:
        """Steps per second, outside stalls."""
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
        """Advances the time to `to`. Until then nothing changes, except that a stall may end."""
        workers = self.job.workers
        live = min(len(self.up), workers)
        used = min(self._used, live)
        length = to - self.now
        still = min(max(0.0, self._until - self.now), length)
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
        """Adds a point to the curve, or replaces the last one if it has the same time."""
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
