"""The search for a good draft: a portfolio of list schedules, then local search from the best ones.

for draft in search(instance, target):     # ever better, without end: the caller decides when to stop
    ...
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from .compiled import LOOPS
from .draft import Draft, times, value
from .instance import Instance
from .policies import Choices
from .sequences import Sequences
from .timing import NEVER

TINY = 200
"""Ops up to which a plan that is not provably optimal gets some milliseconds more."""
SIMULATED = 12_000
"""Ops that the first portfolio simulates (it stops at a provable optimum)."""
MOVED = 60_000
"""Ops that the first round of local search times."""


def search(x: Instance, target: int) -> Iterator[Draft]:
    """The best draft so far, again and again, each time after some more work (about a fifth of a second at most).

    target: a value (ticks) that ends the search, a lower bound for instance. Of large jobs only list schedules are
    tried, and the search ends with the last policy."""
    size = int((x.todo > 0).sum()) * 3 or 1
    choices = Choices.of(x, turns=3 if size < 200_000 else 1)
    slow = 1 if LOOPS.compiled else 10  # plain Python: a taste of it
    table = choices.table(max(12, min(600, 3_000_000 // size) // slow))
    first = max(2, min(12, 40 * SIMULATED // size), min(64, SIMULATED // size)) // slow or 1
    best = portfolio(x, choices, table[:first], target, keep=1)[0]
    if value(x, best) > target and LOOPS.compiled and size < MOVED // 10:
        best = improved(x, best, target, min(400, MOVED // size), 0)
        if size <= TINY and not x.problem.remainder:  # a remainder is waited for
            best = _with_less(x, choices, best, target)
            for seed in range(8 if x.problem.reroute == "any" else 0):  # many more ways to go wrong
                if value(x, best) > target:
                    heat, weight = ((0.5, 1.0), (0.5, 8.0), (2.0, 1.0), (0.2, 1.0))[seed % 4]
                    best = improved(x, best, target, 100 * size, seed, heat, (0.5, 0.0, 1.0)[seed % 3], weight)
    yield best
    drafts, some = [best], max(1, 1_500_000 // size // slow)
    for r in range(first, len(table), some):
        if value(x, best) <= target:
            return
        drafts = sorted([*drafts, *portfolio(x, choices, table[r : r + some], target)], key=lambda d: value(x, d))[:6]
        best = drafts[0]
        yield best
    seed = 0
    while value(x, best) > target and size < MOVED:
        k = seed % len(drafts)
        iterations = max(50, min(50 * size, 8_000_000 // size, 500 << min(seed, 10)))
        heat, weight = ((0.2, 1.0), (0.5, 8.0), (0.2, 1.0), (0.1, 8.0))[seed % 4]
        drafts[k] = improved(x, drafts[k], target, iterations, seed, heat, (0.75, 0.5, 0.25)[seed % 3], weight)
        best = min(best, drafts[k], key=lambda draft: value(x, draft))
        seed += 1
        yield best


def _with_less(x: Instance, choices: Choices, best: Draft, target: int) -> Draft:
    """List scheduling is not monotone: with less it may find a better plan. So a little less memory is tried, at all
    stages and at each, and where micro-batches may go anywhere, one worker less; local search has a go after each."""
    W, P = len(x.cap), x.stages
    stage = np.arange(W) % P
    most = np.minimum(x.cap, _peaks(x, best))
    less = [most - 1, most - 2, *(most - (stage == s) for s in range(P))]
    tries = [(np.maximum(cap, np.minimum(x.cap, 1.0)), choices) for cap in less]
    if x.problem.reroute == "any":
        for w in np.flatnonzero(x.alive):
            if (x.cap[x.alive & (stage == stage[w])] >= 1).sum() > 1:
                cap = np.where(np.arange(W) == w, 0.0, x.cap)
                tries.append((cap, Choices.of(replace(x, cap=cap), turns=1)))
    for seed, (cap, ways) in enumerate(tries, 1):
        drafts = portfolio(replace(x, cap=cap), ways, ways.table(24), target, keep=1)
        for start in (drafts[0], best):
            best = min(best, improved(x, start, target, 400, seed, weight=8.0), key=lambda draft: value(x, draft))
            if value(x, best) <= target:
                return best
    return best


def _peaks(x: Instance, draft: Draft) -> np.ndarray:
    """(w,): the most micro-batches in flight on any worker of the same stage."""
    flying, top = x.held.copy(), x.held.copy()
    change = (1.0, -x.problem.i_release, x.problem.i_release - 1.0, -1.0)
    for code in draft.codes:
        w = draft.host[code >> 2]
        flying[w] += change[code & 3]
        top[w] = max(top[w], flying[w])
    return np.tile(top.reshape(-1, x.stages).max(axis=0), x.problem.pipelines)


def portfolio(x: Instance, choices: Choices, table: np.ndarray, target: int, keep: int = 6) -> list[Draft]:
    """The drafts of the best policies of a table, best first."""
    values, tried, best, codes, starts = simulated(x, choices, table, target)
    drafts = [Draft(codes, starts, choices.hosts[table[best, 0]])]
    if values[best] > target:
        for r in np.argsort(values[:tried], kind="stable")[1:keep]:
            *_, codes, starts = simulated(x, choices, table[r : r + 1], target)
            drafts.append(Draft(codes, starts, choices.hosts[table[r, 0]]))
    return drafts


def simulated(x: Instance, c: Choices, table: np.ndarray, target: int, late: bool = True):
    """portfolio.try_policies on an instance; without `late` a repeated step's ops start as early as they can."""
    return LOOPS.try_policies(
        x.stages, c.hosts, c.keys, c.windows, c.fuses, table, x.todo, x.sent, x.duration, x.cap, x.held, x.release,
        x.send, x.send_rerouted, float(x.problem.i_release), lags(x, None), steady(x) and late, target,
    )  # fmt: skip


def improved(
    x: Instance,
    draft: Draft,
    target: int,
    iterations: int,
    seed: int,
    heat: float = 0.5,
    lean: float = 0.5,
    weight: float = 1.0,
) -> Draft:
    """The best draft that local search finds from this one, at least as good.

    heat: the temperature at the beginning, in mean op durations; lean in [0, 1]: for a repeated step, where in their
    slack the workers' windows lie (0: as early as possible)."""
    P, W = x.stages, len(x.cap)
    free = (x.host < 0) & (x.todo > 0)
    mixed = x.problem.backward == "mixed"
    room = np.tile(3 * free.reshape(-1, P).sum(axis=0), x.problem.pipelines)
    if mixed:
        room = room + np.bincount(draft.host[x.todo > 0], minlength=W)
    q = Sequences.of(x, draft, np.where(x.alive, room, 0))
    release = windows(x, draft, lean) if steady(x) else x.release
    mean = float(np.mean(x.duration[:3, x.alive]))
    LOOPS.improve(
        P, q.host, free, x.todo, x.sent, x.duration, x.cap, x.held, release, x.send, x.send_rerouted,
        float(x.problem.i_release), mixed, lags(x, release), target, q.first, q.length, q.codes, q.starts, q.order,
        iterations, heat * mean + 1.0, weight / W, np.array([seed * 7919 + 12345], dtype=np.int64),
    )  # fmt: skip
    better = q.draft(x, release)
    if steady(x):  # first ops as late as the ends of the stages allow: a shorter period
        better = q.latest(x, times(x, better)[0][np.arange(W) % P])
    return min(better, draft, key=lambda d: value(x, d))  # among equals the new one, so that searches move on


def steady(x: Instance) -> bool:
    """Is the period of the repeated step minimised (else the makespan)?"""
    return x.problem.optimizer == "staggered" and not x.problem.remainder


def lags(x: Instance, release: np.ndarray | None) -> np.ndarray:
    """(w,): what a worker's end of step is after the end of its stage's gradients; of a repeated step, given its
    release, its period. Dead workers and finished stages: hugely negative."""
    lag = x.tail - release if steady(x) and release is not None else x.tail
    out = np.full_like(lag, -(1 << 61))
    out[x.stepping] = lag[x.stepping]
    return out


def windows(x: Instance, draft: Draft, lean: float) -> np.ndarray:
    """(w,): first starts that a repeated step may be planned with, without making its period longer."""
    last, first = times(x, draft)
    ends = last[np.arange(len(x.cap)) % x.stages] + x.tail
    period = int((ends - first)[x.alive & (first < NEVER)].max(initial=0))
    early = np.maximum(ends - period, 0)
    first = np.maximum(np.minimum(first, ends), early)
    return np.where(x.alive, early + ((first - early) * lean).astype(np.int64), 0)
