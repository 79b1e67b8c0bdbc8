"""The initial schedule of a whole step, in milliseconds. More memory hardly ever makes it worse.

    schedule = initial(instance, target)

List scheduling and short local search are not monotone: with more memory, or one more worker, they may find a worse
plan. So the search repeats the same cheap attempt with the problem's limits and with canonical lower limits. There are
two kinds of canonical limits: the same number k at every stage, and the 1F1B limits P - s + k. The search tries every k
(above 16 only round numbers) that keeps each stage's limit within the problem's limit. The attempts for canonical
limits are a subset of those for any higher limits. So if the limits of a problem are canonical, higher limits never
give a worse plan. A chain of decreasing limits ends when the bound rules out any improvement.

If the problem's limits are not canonical, the search also tries limits that are one lower everywhere, or one lower at
one stage. If micro-batches may go anywhere, it also tries one worker fewer at each stage. With these attempts,
monotonicity holds mostly, but not always (docs/planner.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ..bounds import lower_bound
from ..op_kinds import SPLIT
from ..ops import Worker
from ..problem import Problem
from .candidates import improved, simulated
from .instance import Instance
from .partial_schedule import PartialSchedule, value
from .policies import Choices

FEWER = 6
"""Maximum number of problems with one live worker fewer that the search tries."""
RUNS = ((0.5, 0.5, 1.0), (0.5, 0.0, 8.0), (0.2, 1.0, 1.0), (0.2, 0.5, 8.0)) * 6
"""heat, lean and weight of the runs of local search in an attempt."""
PATIENCE = 2
"""An attempt ends after this number of runs without improvement."""

Rows = tuple[np.ndarray, np.ndarray]
"""The results of a policy table: values (rows,), peak numbers of micro-batches in flight (rows, w)."""


def initial(x: Instance, target: int) -> PartialSchedule:
    """The best schedule of all attempts. target: a value in ticks; the search ends early once it finds a schedule with
    at most this value."""
    best = _Best(x, target)
    all_live = _LiveSet(x, best)
    all_live.attempts()
    if best.value > target and x.problem.reroute == "any":
        for fewer in all_live.one_fewer()[:FEWER]:
            if round(lower_bound(fewer) * x.ticks) + 1 < best.value:
                _LiveSet(Instance.of(fewer), best).attempts()
    return best.schedule


def policies(x: Instance) -> int:
    """Number of policies that an attempt simulates."""
    return max(2, min(12, 480_000 // x.size), min(64, 9_000 // x.size))


class _Best:
    """The best schedule so far and its value in ticks. target: the search may end once `value` is at most this."""

    schedule: PartialSchedule

    def __init__(self, x: Instance, target: int) -> None:
        self.x, self.target, self.value = x, target, 1 << 62

    def take(self, schedule: PartialSchedule) -> None:
        found = value(self.x, schedule)
        if found < self.value:
            self.schedule, self.value = schedule, found


class _LiveSet:
    """The attempts with one set of live workers.

    If every message takes the same time and micro-batches may go anywhere, the workers of a stage are interchangeable.
    In that case they are renumbered, live ones first, so that the result does not depend on which workers are dead."""

    def __init__(self, x: Instance, best: _Best) -> None:
        self.problem, self.best = x.problem, best
        self.alike = x.problem.reroute == "any" and x.anywhere_alike
        self.names = np.arange(len(x.cap))  # (w,): original number of worker w
        if self.alike:
            stage = self.names % x.stages
            order = np.lexsort((self.names, -x.cap, x.duration[: len(SPLIT)].sum(axis=0), ~x.alive, stage))
            self.names = order.reshape(x.stages, -1).T.reshape(-1)
        at = self.names
        self.x = replace(
            x, alive=x.alive[at], duration=np.ascontiguousarray(x.duration[:, at]), cap=x.cap[at], held=x.held[at],
            release=x.release[at],
        )  # fmt: skip
        self.choices = Choices.of(self.x)
        self.table = self.choices.table(policies(x))
        self._refined: set[bytes] = set()
        self._bounds: dict[tuple[float, ...], int] = {}

    def attempts(self) -> None:
        """Run the attempts with the problem's limits and with lower ones."""
        top = self.attempt(self.x.cap)
        if top is not None and self.best.value > self.best.target:
            for chain in (*_canonical(self.x), *_one_less(self.x)):
                above: Rows | None = top
                for cap in chain:
                    above = above and self.attempt(cap, above)

    def attempt(self, cap: np.ndarray, above: Rows | None = None) -> Rows | None:
        """Try the policies with the limits `cap`, then local search from the best one. Returns the results of all
        policies, None if the bound rules out any improvement.

        above: the results with higher limits. A policy whose peaks were within `cap` is not simulated again."""
        again = np.ones(len(self.table), dtype=bool) if above is None else (above[1] > cap + 1e-6).any(axis=1)
        if above is not None and not again.any():
            return above
        goal = self.bound(cap)
        if max(goal, self.best.target) >= self.best.value:
            return None
        x = replace(self.x, cap=cap)
        if above is None:
            values, peaks = simulated(x, self.choices, self.table, goal)[:2]
        else:
            values, peaks = above[0].copy(), above[1].copy()
            values[again], peaks[again] = simulated(x, self.choices, self.table[again], 0)[:2]
        r = int(values.argmin())
        *_, codes, starts = simulated(x, self.choices, self.table[r : r + 1], 0)
        schedule = PartialSchedule(codes, starts, self.choices.hosts[self.table[r, 0]])
        key = codes.tobytes() + starts.tobytes() + schedule.host.tobytes()
        if key not in self._refined:
            self._refined.add(key)
            self._take(schedule)
            if values[r] > goal:
                self._refine(schedule, peaks[r])
        return values, peaks

    def _refine(self, schedule: PartialSchedule, peaks: np.ndarray) -> None:
        """Local search with the schedule's own peaks as limits, so that the result depends on the schedule only."""
        most = np.tile(peaks.reshape(-1, self.x.stages).max(axis=0), self.problem.pipelines)
        x = replace(self.x, cap=np.minimum(self.x.cap, most))
        goal = self.bound(x.cap)
        values = [value(x, schedule)]
        for seed, run in enumerate(RUNS):
            schedule = improved(x, schedule, goal, min(400, 45_000 // x.size), seed, *run)
            values.append(value(x, schedule))
            if values[-1] <= goal or (len(values) > PATIENCE and values[-1] == values[-1 - PATIENCE]):
                break
        self._take(schedule)

    def _take(self, schedule: PartialSchedule) -> None:
        self.best.take(PartialSchedule(schedule.codes, schedule.starts, self.names[schedule.host]))

    def bound(self, cap: np.ndarray) -> int:
        """The lower bound in ticks with the limits `cap` (w,)."""
        most = tuple(np.where(self.x.alive, cap, 0).reshape(-1, self.x.stages).max(axis=0).tolist())
        if most not in self._bounds:
            self._bounds[most] = round(lower_bound(self.problem, most) * self.x.ticks) + 1
        return self._bounds[most]

    def one_fewer(self) -> list[Problem]:
        """The problems with one live worker fewer, sorted by lower bound. One problem for each kind of worker."""
        x = self.x
        problem = self.problem.without_bytes  # with `memory`, a dead worker would change its peers' modes and limits
        kinds: set[tuple[float, ...]] = set()
        found: list[tuple[float, int, Problem]] = []
        for w in np.flatnonzero(x.alive)[::-1]:
            kind = (w % x.stages, x.cap[w], *x.duration[:, w])
            if x.alive[w % x.stages :: x.stages].sum() > 1 and not (self.alike and kind in kinds):
                kinds.add(kind)
                lost = Worker(*divmod(int(self.names[w]), x.stages))
                try:
                    fewer = problem.replace(failed=[*problem.dead, lost])
                except ValueError:  # the stage's other workers have no room for a micro-batch
                    continue
                found.append((lower_bound(fewer, [np.inf] * x.stages), len(found), fewer))
        return [fewer for *_, fewer in sorted(found, key=lambda entry: entry[:2])]


def _canonical(x: Instance) -> Iterator[list[np.ndarray]]:
    """Yield two chains of limits. Each chain is a list of arrays (w,), highest limits first. In the first chain all
    stages have the same limit k. In the second chain each stage has its limit of 1F1B plus k. Dead workers, and workers
    with a limit below 1 in the problem, keep their limits."""
    roomy = x.alive & (x.cap >= 1)
    for shape in _shapes(x):
        most = math.floor(min((x.cap - shape)[roomy].min(), x.problem.total))  # int() would round up below 0
        least = 1 - int(shape.min())
        yield [np.where(roomy, shape + k, x.cap) for k in range(most, least - 1, -1) if _round(k)]


def _one_less(x: Instance) -> Iterator[list[np.ndarray]]:
    """Yield chains of one array each, none if the problem's limits are canonical. The first array lowers the limits of
    all stages by 1. Each of the other arrays lowers the limits of one stage by 1."""
    roomy = x.alive & (x.cap >= 1)
    for shape in _shapes(x):
        room = (x.cap - shape)[roomy]
        if (room == room[0]).all() and (room[0] == np.inf or _round(room[0])):
            return
    stage = np.arange(len(x.cap)) % x.stages
    for less in (np.ones(len(stage)), *(stage == s for s in range(x.stages))):
        if ((x.cap - less)[roomy] >= 1).all():
            yield [np.where(roomy, x.cap - less, x.cap)]


def _round(k: float) -> bool:
    """Whether k is one of the canonical numbers: every number up to 16, every second one up to 32, every fourth one up
    to 64, and so on."""
    return k % (1 << max(0, int(k).bit_length() - 4)) == 0


def _shapes(x: Instance) -> tuple[np.ndarray, np.ndarray]:
    """The bases of the two chains, (w,) each: 0, and P - s. A chain adds k to its base."""
    stage = np.arange(len(x.cap)) % x.stages
    return np.zeros(len(stage)), (x.stages - stage).astype(float)
