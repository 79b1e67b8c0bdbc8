"""The initial schedule of a whole step: good, in milliseconds, and hardly ever worse than with less.

schedule = initial(instance, target)

Neither list scheduling nor a short local search is monotone: with more memory, or one more worker, they may find a
worse plan. So the same cheap attempt is made with all that the problem allows and with canonical lower limits: every
number k, and every 1F1B limit P - s + k, that is nowhere above the problem's limits (k up to 16; beyond, round ones).
Higher limits have all the attempts of a canonical one below them: a plan with such a limit is never better than one
with more memory, whatever form that has. A chain of limits ends where the bound forbids anything better.

Other limits are tried with one less everywhere, and at each stage; where micro-batches may go anywhere, each stage is
tried with one worker less. That makes exceptions rare, not impossible.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ..bounds import lower_bound
from ..ops import Worker
from ..problem import Problem
from .candidates import improved, simulated
from .instance import Instance
from .partial_schedule import PartialSchedule, value
from .policies import Choices

FEWER = 6
"""Most live sets with one worker less that are tried."""
RUNS = ((0.5, 0.5, 1.0), (0.5, 0.0, 8.0), (0.2, 1.0, 1.0), (0.2, 0.5, 8.0)) * 6
"""heat, lean and weight of the runs of local search in an attempt, as many as help."""
PATIENCE = 2
"""Runs of local search without success that end an attempt."""

Rows = tuple[np.ndarray, np.ndarray]
"""What a table of policies came to: values (rows,), most micro-batches in flight (rows, w)."""


def initial(x: Instance, target: int) -> PartialSchedule:
    """The best schedule of all attempts; `target` (ticks) ends them."""
    best = _Best(x, target)
    everybody = _LiveSet(x, best)
    everybody.attempts()
    if best.value > target and x.problem.reroute == "any":
        for fewer in everybody.one_fewer()[:FEWER]:
            if round(lower_bound(fewer) * x.ticks) + 1 < best.value:
                _LiveSet(Instance.of(fewer), best).attempts()
    return best.schedule


def policies(x: Instance) -> int:
    """How many policies an attempt simulates."""
    return max(2, min(12, 480_000 // x.size), min(64, 9_000 // x.size))


class _Best:
    """The best schedule so far. It ends with the target."""

    schedule: PartialSchedule

    def __init__(self, x: Instance, target: int) -> None:
        self.x, self.target, self.value = x, target, 1 << 62

    def take(self, schedule: PartialSchedule) -> None:
        found = value(self.x, schedule)
        if found < self.value:
            self.schedule, self.value = schedule, found


class _LiveSet:
    """Attempts with the live workers of a problem. Where latencies are alike and micro-batches may go anywhere, the
    workers of a stage may change places: there the live ones come first, so that it does not matter who is dead."""

    def __init__(self, x: Instance, best: _Best) -> None:
        self.problem, self.best = x.problem, best
        self.alike = x.problem.reroute == "any" and x.anywhere_alike
        self.names = np.arange(len(x.cap))  # (w,): who is called w here
        if self.alike:
            stage = self.names % x.stages
            order = np.lexsort((self.names, -x.cap, x.duration[:3].sum(axis=0), ~x.alive, stage))
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
        """With the problem's limits and below."""
        top = self.attempt(self.x.cap)
        if top is not None and self.best.value > self.best.target:
            for chain in (*_canonical(self.x), *_one_less(self.x)):
                above: Rows | None = top
                for cap in chain:
                    above = above and self.attempt(cap, above)

    def attempt(self, cap: np.ndarray, above: Rows | None = None) -> Rows | None:
        """The policies with these limits, and local search from the best one. None: the bound forbids anything better.

        above: what came out with higher limits; a policy that kept to the lower ones does the same again."""
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
        """Local search with no more memory than the schedule's own: what comes out depends on nothing else."""
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
        """In ticks."""
        most = tuple(np.where(self.x.alive, cap, 0).reshape(-1, self.x.stages).max(axis=0).tolist())
        if most not in self._bounds:
            self._bounds[most] = round(lower_bound(self.problem, most) * self.x.ticks) + 1
        return self._bounds[most]

    def one_fewer(self) -> list[Problem]:
        """Problems with one live worker less, one of those that are alike; those that lose least come first."""
        x = self.x
        kinds: set[tuple[float, ...]] = set()
        found: list[tuple[float, int, Problem]] = []
        for w in np.flatnonzero(x.alive)[::-1]:
            kind = (w % x.stages, x.cap[w], *x.duration[:, w])
            if x.alive[w % x.stages :: x.stages].sum() > 1 and not (self.alike and kind in kinds):
                kinds.add(kind)
                lost = Worker(*divmod(int(self.names[w]), x.stages))
                try:
                    fewer = self.problem.replace(failed=[*self.problem.dead, lost])
                except ValueError:  # nobody else at the stage may hold anything
                    continue
                found.append((lower_bound(fewer, [np.inf] * x.stages), len(found), fewer))
        return [fewer for *_, fewer in sorted(found, key=lambda entry: entry[:2])]


def _canonical(x: Instance) -> Iterator[list[np.ndarray]]:
    """Two chains of limits (w,), highest first: numbers, and 1F1B's. Workers that may hold nothing stay so."""
    roomy = x.alive & (x.cap >= 1)
    for shape in _shapes(x):
        most = int(min((x.cap - shape)[roomy].min(), x.problem.total))
        least = 1 - int(shape.min())
        yield [np.where(roomy, shape + k, x.cap) for k in range(most, least - 1, -1) if _round(k)]


def _one_less(x: Instance) -> Iterator[list[np.ndarray]]:
    """Limits that are not canonical: one less everywhere and at each stage."""
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
    """Every whole number up to 16, every second one up to 32, every fourth up to 64, and so on."""
    return k % (1 << max(0, int(k).bit_length() - 4)) == 0


def _shapes(x: Instance) -> tuple[np.ndarray, np.ndarray]:
    stage = np.arange(len(x.cap)) % x.stages
    return np.zeros(len(stage)), (x.stages - stage).astype(float)
