"""Candidate schedules, from list scheduling and from local search.

schedules = portfolio(instance, choices, table, target)          # the best list schedules, best first
schedule = improved(instance, schedule, target, 400, seed=0)     # one run of local search
schedule = retimed(instance, schedule)                           # the same order with this instance's times
"""

from __future__ import annotations

import numpy as np

from ..compiled import LOOPS
from ..compiled.timing import NEVER
from ..op_kinds import SPLIT
from .instance import Instance
from .partial_schedule import PartialSchedule, times, value
from .policies import Choices
from .sequences import Sequences


def portfolio(x: Instance, choices: Choices, table: np.ndarray, target: int, keep: int = 6) -> list[PartialSchedule]:
    """The schedules of the `keep` best policies of a table, best first. Only the best one if it reaches the target."""
    values, _, best, _, codes, starts = simulated(x, choices, table, target)
    schedules = [PartialSchedule(codes, starts, choices.hosts[table[best, 0]])]
    if values[best] > target:
        for r in np.argsort(values, kind="stable")[1:keep]:
            *_, codes, starts = simulated(x, choices, table[r : r + 1], target)
            schedules.append(PartialSchedule(codes, starts, choices.hosts[table[r, 0]]))
    return schedules


def simulated(x: Instance, c: Choices, table: np.ndarray, target: int, late: bool = True):
    """(values, peaks, best, ends, codes, starts) of a policy table, from `compiled.portfolio.try_policies`.

    late: whether ops of a repeated step start as late as they can without delaying the end of any stage, which shortens
        the period."""
    return LOOPS.try_policies(
        x.stages, c.hosts, c.keys, c.windows, c.fuses, table, x.todo, x.sent, x.duration, x.cap, x.held, x.release,
        x.travel, float(x.problem.i_release), lags(x, None), steady(x) and late, target,
    )  # fmt: skip


def improved(
    x: Instance,
    schedule: PartialSchedule,
    target: int,
    iterations: int,
    seed: int,
    heat: float = 0.5,
    lean: float = 0.5,
    weight: float = 1.0,
) -> PartialSchedule:
    """The best schedule from one run of local search, never worse than the given one.

    target       value in ticks that ends the run
    iterations   maximum number of steps of the run
    seed         seed of the random numbers
    heat         initial temperature, in mean op durations
    lean         for a repeated step: how each worker's first start is moved within its slack, from 0 (as early as
                 possible) to 1 (not moved)
    weight       weight of the mean lateness in the energy"""
    P, W = x.stages, len(x.cap)
    free = (x.host < 0) & (x.todo > 0)
    mixed = np.tile([x.problem.backward == "mixed" and not whole for whole in x.problem.coupled], x.problem.pipelines)
    room = np.tile(3 * free.reshape(-1, P).sum(axis=0), x.problem.pipelines)
    if mixed.any():
        room = room + np.bincount(schedule.host[x.todo > 0], minlength=W)
    q = Sequences.of(x, schedule, np.where(x.alive, room, 0))
    release = windows(x, schedule, lean) if steady(x) else x.release
    mean = float(np.mean(x.duration[: len(SPLIT), x.alive]))
    LOOPS.improve(
        P, q.host, free, x.todo, x.sent, x.duration, x.cap, x.held, release, x.travel,
        float(x.problem.i_release), mixed, lags(x, release), target, q.first, q.length, q.codes, q.starts, q.order,
        iterations, heat * mean + 1.0, weight / W, np.array([seed * 7919 + 12345], dtype=np.int64),
    )  # fmt: skip
    better = _timed(x, q, release)
    return min(better, schedule, key=lambda d: value(x, d))  # `better` wins a tie, so that the search moves on


def retimed(x: Instance, schedule: PartialSchedule) -> PartialSchedule:
    """The schedule with the same ops, workers and order, at the best times for this instance."""
    return _timed(x, Sequences.of(x, schedule), x.release)


def _timed(x: Instance, q: Sequences, release: np.ndarray) -> PartialSchedule:
    """The schedule with every op as early as possible. In a repeated step, every op is then moved as late as it can be
    without delaying the end of any stage, which shortens the period."""
    early = q.earliest(x, release)
    return q.latest(x, times(x, early)[0][np.arange(len(x.cap)) % x.stages]) if steady(x) else early


def steady(x: Instance) -> bool:
    """Whether the objective is the period of the repeated step, not the makespan."""
    return x.problem.optimizer == "staggered" and not x.problem.remainder


def lags(x: Instance, release: np.ndarray | None) -> np.ndarray:
    """(w,): the lag of each worker in ticks. The lag is the time from the end of its stage's last gradient to the end
    of the worker's optimizer step. A worker's value is the end of its stage's last gradient plus its lag, and the
    objective is the largest value of any worker.

    If the step is repeated and `release` is given, `release` is subtracted from the lag. Dead workers and workers of
    finished stages have a very large negative lag."""
    lag = x.tail - release if steady(x) and release is not None else x.tail
    out = np.full_like(lag, -(1 << 61))
    out[x.stepping] = lag[x.stepping]
    return out


def windows(x: Instance, schedule: PartialSchedule, lean: float) -> np.ndarray:
    """(w,): for each worker, a time at which its first op may start without lengthening the period of a repeated step.

    lean: as in `improved`."""
    last, first = times(x, schedule)
    ends = last[np.arange(len(x.cap)) % x.stages] + x.tail
    period = int((ends - first)[x.alive & (first < NEVER)].max(initial=0))
    early = np.maximum(ends - period, 0)
    first = np.maximum(np.minimum(first, ends), early)
    return np.where(x.alive, early + ((first - early) * lean).astype(np.int64), 0)
