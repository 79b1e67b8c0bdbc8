"""A lower bound for the remainder of a broken step.

    remainder_bound(problem)

The bound is the maximum of three bounds:
- the longest chain of missing ops;
- for each worker, the one-machine problem of its missing ops (`compiled/one_machine.py`). The head of an op is the
  earliest time at which it can start, its tail is the time that must follow its end;
- for each stage, the best split of the micro-batches that are not yet bound to a worker.
"""

from __future__ import annotations

import heapq
import math

import numpy as np

from ..compiled import LOOPS
from ..op_kinds import COMPUTE, OpKind
from ..ops import Worker
from ..problem import Problem
from ..progress import NEED_ALL, NEED_F, NEED_G, NEED_W, NEEDS, SENT_B, SENT_F

Array = np.ndarray


def remainder_bound(p: Problem) -> float:
    """A lower bound on the time from now to the end of the step, optimizer steps included. Ignores memory limits."""
    open_ = [s for s in range(p.stages) if s not in p.finished]
    if not open_:
        return 0.0
    x = _Missing(p, open_)
    steps = [x.tail[s] + 0.0 for s in open_]
    stepping = [w for w in p.workers() if w.stage in open_ and p.optimizer != "none"]
    idle = [p.busy.get(w, 0.0) + p.duration(OpKind.OPTIMIZER, w) for w in stepping]
    return max([0.0, *steps, *idle, x.longest_chain(), x.stage_shares(), x.one_machine()])


class _Missing:
    """The missing ops as arrays (P, N), nan if an op is not missing.

    head: earliest start of the op. length: its duration. tail: least time from its end to the end of the step."""

    def __init__(self, p: Problem, open_: list[int]) -> None:
        self.p, self.open = p, open_
        P, N = p.stages, p.total
        F, I, W, B = (np.array(p.per_stage(kind)) for kind in COMPUTE)
        g = {"coupled": B, "decoupled": I, "mixed": np.minimum(I, B)}[p.backward]
        rest = {"coupled": 0 * B, "decoupled": W, "mixed": np.minimum(B, I + W) - g}[p.backward]
        self.work = F, g, rest
        self.tail = _tails(p, open_)
        speed = np.ones((P, p.pipelines))
        free = np.full((P, p.pipelines), math.inf)
        for w in p.workers():
            speed[w.stage, w.pipeline] = p.speeds.get(w, 1.0)
            free[w.stage, w.pipeline] = p.busy.get(w, 0.0)
        self.speed, self.free = speed, free
        alive = np.isfinite(free)
        pipeline = np.repeat(np.arange(p.pipelines), p.counts)
        host = np.full((P, N), -1)
        for s in open_:
            if p.reroute == "failed_only":
                host[s] = np.where(alive[s, pipeline], pipeline, -1)
            if alive[s].sum() == 1:
                host[s] = int(np.flatnonzero(alive[s])[0])
        of = p.progress
        host = np.where((of.host.T >= 0) & p.open[:, None], of.host.T, host)
        had = sum(need * ((of.kinds.T & kinds) != 0) for need, kinds in NEEDS)
        there = of.sent.T.copy()
        there[list(p.finished)] = SENT_F | SENT_B
        had[list(p.finished)] = NEED_ALL
        self.host = host
        fast = np.where(alive, speed, 0).max(axis=1)
        v = np.where(host >= 0, np.take_along_axis(speed, np.maximum(host, 0), 1), fast[:, None])
        self.ready = np.where(host >= 0, np.take_along_axis(free, np.maximum(host, 0), 1), free.min(axis=1)[:, None])
        self.F = np.where(had & NEED_F, np.nan, F[:, None] / v)
        self.G = np.where(had & NEED_G, np.nan, g[:, None] / v)
        late = np.where(had & NEED_G, W[:, None], rest[:, None]) / v
        self.W = np.where(had & NEED_W, np.nan, late)
        lag = p.graph.time(np.arange(P - 1)[:, None], host[:-1], host[1:])  # (P - 1, N): from stage s to s + 1
        least = np.array([p.graph.least(s) for s in range(P - 1)])[:, None]
        lag = np.where((host[:-1] >= 0) & (host[1:] >= 0), lag, least)
        self._heads_and_tails(there, lag)

    def _heads_and_tails(self, there: Array, lag: Array) -> None:
        """Set `jobs` to three tuples (head, length, tail): for F, for I or B, and for W.

        there (P, N): SENT_F and SENT_B bits of the outputs that have been delivered.
        lag (P - 1, N): shortest possible time of each micro-batch's message between stages s and s + 1."""
        P = self.p.stages
        hF, hG = self.ready.copy(), self.ready.copy()
        for s in range(1, P):
            comes = _without_nan(hF[s - 1] + self.F[s - 1]) + lag[s - 1]
            hF[s] = np.where(there[s - 1] & SENT_F, hF[s], np.maximum(hF[s], comes))
        for s in reversed(range(P)):
            if s < P - 1:
                comes = _without_nan(hG[s + 1] + self.G[s + 1]) + lag[s]
                hG[s] = np.where(there[s + 1] & SENT_B, hG[s], np.maximum(hG[s], comes))
            hG[s] = np.maximum(hG[s], _without_nan(hF[s] + self.F[s]))
        tG = np.nan_to_num(self.W) + self.tail[:, None]
        for s in range(1, P):
            more = lag[s - 1] + _without_nan(self.G[s - 1] + tG[s - 1])
            tG[s] = np.where(there[s] & SENT_B, tG[s], np.maximum(tG[s], more))
        tF = _without_nan(self.G + tG)
        for s in reversed(range(P - 1)):
            more = lag[s] + _without_nan(self.F[s + 1] + tF[s + 1])
            tF[s] = np.where(there[s] & SENT_F, tF[s], np.maximum(tF[s], more))
        hW = np.where(np.isnan(self.G), self.ready, hG + self.G)
        tW = np.broadcast_to(self.tail[:, None], hW.shape)
        self.jobs = (hF, self.F, tF), (hG, self.G, tG), (hW, self.W, tW)

    def longest_chain(self) -> float:
        """The largest head + length + tail of any missing op."""
        sums = [np.nan_to_num(h + x + t, nan=0.0).max(initial=0.0) for h, x, t in self.jobs]
        return float(max(sums))

    def stage_shares(self) -> float:
        """The largest of one bound per stage. In the bound, the stage's unbound micro-batches are split over its
        workers in the best way. The work starts at the earliest head of the stage's ops, and their least tail follows
        it."""
        best = 0.0
        F, g, rest = self.work
        for s in self.open:
            for jobs, cost in ((self.jobs, F[s] + g[s] + rest[s]), (self.jobs[:2], F[s] + g[s])):
                missing = [(h[s], x[s], t[s], ~np.isnan(x[s])) for h, x, t in jobs]
                if not any(m.any() for *_, m in missing):
                    continue
                ready = min(float(h[m].min()) for h, _, _, m in missing if m.any())
                after = min(float(t[m].min()) for _, _, t, m in missing if m.any())
                own = np.zeros(self.p.pipelines)
                for _, x, _, m in missing:
                    np.add.at(own, self.host[s][m & (self.host[s] >= 0)], x[m & (self.host[s] >= 0)])
                chosen = int((missing[0][3] & (self.host[s] < 0)).sum())
                live = list(self.p.live[s])
                end = np.maximum(self.free[s, live], ready) + own[live]
                top = float(end[own[live] > 0].max(initial=0.0))
                heap = [(float(e + cost / v), float(cost / v)) for e, v in zip(end, self.speed[s, live], strict=True)]
                heapq.heapify(heap)
                for _ in range(chosen):
                    t, c = heap[0]
                    top = max(top, t)
                    heapq.heapreplace(heap, (t + c, c))
                best = max(best, top + after)
        return best

    def one_machine(self) -> float:
        """The largest of one bound per worker: the earliest end of the step if the worker runs the ops that no other
        worker may run, in the best order (`compiled.one_machine`)."""
        bound = self.host >= 0
        missing = [bound & ~np.isnan(x) for _, x, _ in self.jobs]
        head, length, tail = (
            np.concatenate([job[k][m] for job, m in zip(self.jobs, missing, strict=True)]) for k in range(3)
        )
        machine = np.arange(len(self.host))[:, None] * self.p.pipelines + self.host
        machine = np.concatenate([machine[m] for m in missing])
        by_head = np.lexsort((head, machine))
        head, length, tail, machine = head[by_head], length[by_head], tail[by_head], machine[by_head]
        begin = np.searchsorted(machine, np.arange(self.p.stages * self.p.pipelines + 1))
        order = np.argsort(-tail, kind="stable")
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        return float(LOOPS.one_machine(begin, head, length, tail, order, rank))


def _without_nan(times: Array) -> Array:
    """The times with -inf in place of nan, because an op that is not missing delays nothing."""
    return np.nan_to_num(times, nan=-math.inf)


def _tails(p: Problem, open_: list[int]) -> Array:
    """(P,): least time from the stage's last gradient to the end of the step."""
    tail = np.zeros(p.stages)
    if p.optimizer == "none":
        return tail
    step = {s: max(p.duration(OpKind.OPTIMIZER, Worker(d, s)) for d in p.live[s]) for s in open_}
    for s in open_:
        tail[s] = p.per_stage("allreduce")[s] + (max(step.values()) if p.optimizer == "barrier" else step[s])
    return tail
