"""Checks a plan against the rules of docs/planner.md.

    errors = validate(plan)          # [] if the plan is valid, else sentences

It works on flat arrays and checks a million ops in a second.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from .in_flight import in_flight, tolerance
from .op_kinds import COMPUTE, KINDS, B, F, I, O, OpKind, W
from .ops import Worker
from .plans import OpArrays, Plan
from .problem import Problem
from .problem_keys import OP_SETS
from .progress import BIT, SENT

EPS = 1e-9
"""Smallest tolerance when comparing times, in the plan's unit (`in_flight.tolerance`)."""
LENGTH = 1e-6
"""Smallest tolerance on an op's duration, and tolerance on a memory limit."""
SHOWN = 20
"""Maximum number of errors listed per kind of error."""

Array = np.ndarray


def validate(plan: Plan, period: float | None = None) -> list[str]:
    """The errors of a plan, as sentences; [] if it is valid.

    period: interval at which a whole step is repeated; the repeated plan must be valid too. Default: `plan.period`."""
    p, a = plan.problem, plan.arrays
    check = _Check(p, a)
    check.each_op()
    check.each_microbatch()
    check.messages()
    check.optimizer()
    check.workers(a, "")
    if not check.errors and not p.remainder and len(a):
        T = plan.period if period is None else period
        assert T is not None and plan.period is not None
        if plan.period - check.eps > T:
            check.errors.append(f"period {T:g} is shorter than the plan's own period {plan.period:g}")
        else:
            check.workers(_repeated(a, T), "repeated: ")
    return check.errors


def _repeated(a: OpArrays, period: float) -> OpArrays:
    """The ops of two consecutive steps. Two steps are enough to show any error of the repetition."""
    kind, microbatch, stage, pipeline = (np.tile(c, 2) for c in (a.kind, a.microbatch, a.stage, a.pipeline))
    return OpArrays(
        kind,
        microbatch,
        stage,
        pipeline,
        np.concatenate([a.start, a.start + period]),
        np.concatenate([a.end, a.end + period]),
    )


class _Check:
    """The checks, and the errors found so far.

    start, end, place: tables (5, N, P), indexed by kind, micro-batch and stage. `place` is the pipeline of the worker
    that runs the op. For an op that is not in the plan, start and end are nan and place is -1."""

    def __init__(self, p: Problem, a: OpArrays) -> None:
        self.p, self.a, self.errors = p, a, list[str]()
        self.eps = tolerance(EPS, a)
        N, P = p.total, p.stages
        self.start = np.full((5, N, P), np.nan)
        self.end = np.full((5, N, P), np.nan)
        self.place = np.full((5, N, P), -1, dtype=np.int64)
        m = a.kind != O
        at = a.kind[m], a.microbatch[m], a.stage[m]
        self.start[at], self.end[at], self.place[at] = a.start[m], a.end[m], a.pipeline[m]
        code = (a.kind[m].astype(np.int64) * N + a.microbatch[m]) * P + a.stage[m]
        twice = code[np.setdiff1d(np.arange(len(code)), np.unique(code, return_index=True)[1])]
        self._add(
            twice,
            lambda c: f"{KINDS[c // (N * P)]} of micro-batch {self._mb(c // P % N)} at stage {c % P} occurs twice",
        )
        self.kept = {(int(p.first[mb[0]]) + mb[1], s): b for (mb, s), b in p.begun.items()}

    def _mb(self, g: int) -> tuple[int, int]:
        """(pipeline, index) of a global id."""
        first = self.p.first
        d = int(np.searchsorted(first, g, side="right")) - 1
        return d, int(g - first[d])

    def _worker(self, number: int) -> Worker:
        """The worker with number d * P + s."""
        return Worker(*divmod(int(number), self.p.stages))

    def _add(self, found, sentence) -> None:
        """Add the error sentence(k) for each of the first SHOWN entries k of `found`, and the number of the others."""
        for k in found[:SHOWN]:
            self.errors.append(sentence(k))
        if len(found) > SHOWN:
            self.errors.append(f"... and {len(found) - SHOWN} more like this")

    def _op(self, k: int) -> str:
        """Op k as text."""
        a = self.a
        mb = "" if a.kind[k] == O else f" of micro-batch {self._mb(int(a.microbatch[k]))}"
        return f"{KINDS[a.kind[k]]}{mb} on worker {Worker(int(a.pipeline[k]), int(a.stage[k]))}"

    def each_op(self) -> None:
        """Check that every op runs on a live worker, lasts its duration, and starts when the worker is free. With
        `failed_only`, an op must stay in its micro-batch's pipeline if the worker of that pipeline is alive."""
        p, a = self.p, self.a
        D, P = p.pipelines, p.stages
        dead = np.zeros((D, P), dtype=bool)
        speed = np.ones((D, P))
        busy = np.full((D, P), 0.0 if p.remainder else -np.inf)
        for w in p.dead:
            dead[w] = True
        for w, v in p.speeds.items():
            speed[w] = v
        for w, t in p.busy.items():
            busy[w] = t
        at = a.pipeline, a.stage
        time = np.array([p.per_stage(kind) for kind in KINDS])[a.kind, a.stage] / speed[at]
        self._add(np.flatnonzero(dead[at]), lambda k: f"{self._op(k)}: the worker is dead")
        wrong = np.abs(a.end - a.start - time) > tolerance(LENGTH, a)
        self._add(np.flatnonzero(wrong), lambda k: f"{self._op(k)} lasts {a.end[k] - a.start[k]:g}, not {time[k]:g}")
        committed = np.isin(a.stage, list(p.finished))
        self._add(np.flatnonzero(committed), lambda k: f"{self._op(k)}: the stage is committed")
        self._add(
            np.flatnonzero(a.start < busy[at] - self.eps), lambda k: f"{self._op(k)} starts before its worker is free"
        )
        pipeline = np.repeat(np.arange(D), p.counts)
        home = np.where(a.kind == O, a.pipeline, pipeline[a.microbatch] if len(pipeline) else a.pipeline)
        moved = (a.kind != O) & (home != a.pipeline)
        begun = np.zeros((p.total + 1, P), dtype=bool)
        for g, s in self.kept:
            begun[g, s] = True
        if p.reroute == "failed_only":
            stray = moved & ~dead[home, a.stage] & ~begun[a.microbatch, a.stage]
            self._add(np.flatnonzero(stray), lambda k: f"{self._op(k)}: re-routed though its own worker is alive")

    def each_microbatch(self) -> None:
        """Check that every micro-batch has the required ops at every stage, on one worker, in order."""
        p = self.p
        bits = np.zeros((p.total, p.stages), dtype=np.int64)
        for kind in COMPUTE:
            bits |= (self.place[kind.code] >= 0).astype(np.int64) * BIT[kind]
        full = [[_bits(kinds) for kinds in OP_SETS["coupled" if whole else p.backward]] for whole in p.coupled]
        fine = np.array([np.isin(bits[:, s], full[s]) for s in range(p.stages)]).T
        for (g, s), (_, kinds) in self.kept.items():
            sets = [_bits(every) for every in OP_SETS[p.backward]] if OpKind.BACKWARD_INPUT in kinds else full[s]
            done = _bits(kinds)
            fine[g, s] = int(bits[g, s]) in [every - done for every in sets if every & done == done]
        fine[:, list(p.finished)] = bits[:, list(p.finished)] == 0
        self._add(
            np.argwhere(~fine),
            lambda k: f"micro-batch {self._mb(k[0])} at stage {k[1]} has the wrong ops: {_letters(bits[tuple(k)])}",
        )
        here = self.place[[kind.code for kind in COMPUTE]]
        top = here.max(axis=0)
        low = np.where(here >= 0, here, 1 << 30).min(axis=0)
        apart = (top >= 0) & (low != top)
        for (g, s), (w, _) in self.kept.items():
            apart[g, s] |= bool(top[g, s] >= 0) and bool(low[g, s] != w.pipeline or top[g, s] != w.pipeline)
        self._add(np.argwhere(apart), lambda k: f"micro-batch {self._mb(k[0])} at stage {k[1]} runs on several workers")
        for first, then in ((F, I), (F, B), (I, W)):
            early = self.start[then] < self.end[first] - self.eps
            self._add(
                np.argwhere(early),
                lambda k, a=first, b=then: (
                    f"{KINDS[b]} of {self._mb(k[0])} at stage {k[1]} starts before its {KINDS[a]} ends"
                ),
            )

    def messages(self) -> None:
        """Check that every F and backward starts after its input has arrived from the adjacent stage."""
        p = self.p
        whole = np.isnan(self.start[I])
        forward = self.start[F], self.end[F], self.place[F]
        backward = tuple(np.where(whole, table[B], table[I]) for table in (self.start, self.end, self.place))
        for kind, (start, end, place) in ((OpKind.FORWARD, forward), (OpKind.BACKWARD_INPUT, backward)):
            assert kind.makes is not None
            there = (p.progress.sent & SENT[kind.makes]) > 0
            there[:, ~p.open] = True
            for s in range(p.stages):
                t = s + kind.makes.step
                if not 0 <= t < p.stages:
                    continue
                lag = p.graph.time(min(s, t), *(place[:, x] for x in sorted((s, t))))
                early = (start[:, t] < end[:, s] + lag - self.eps) & ~there[:, s]
                self._add(
                    np.flatnonzero(early),
                    lambda g, t=t, s=s, kind=kind: (
                        f"{kind} of {self._mb(g)} at stage {t} starts before the tensor from stage {s} arrives"
                    ),
                )

    def optimizer(self) -> None:
        """Check that every live worker has one O, after all gradients and the all-reduce of the worker's stage. With a
        barrier, the O must come after the gradients and all-reduces of all stages."""
        p, a = self.p, self.a
        m = a.kind == O
        if p.optimizer == "none":
            if m.any():
                self.errors.append("the plan has O ops, but its problem has no optimizer step")
            return
        open_ = [s for s in range(p.stages) if s not in p.finished]
        last = np.where(np.isnan(self.end[[W, B]]), -np.inf, self.end[[W, B]]).max(axis=(0, 1), initial=-np.inf)
        if p.remainder:
            last = np.maximum(last, 0.0)
        ready = last + np.array(p.per_stage("allreduce"))
        if p.optimizer == "barrier" and open_:
            ready = np.full(p.stages, ready[open_].max())
        count = np.zeros((p.pipelines, p.stages), dtype=int)
        np.add.at(count, (a.pipeline[m], a.stage[m]), 1)
        for w in p.workers():
            if w.stage in open_ and count[w] != 1:
                self.errors.append(f"worker {w} has {count[w]} O, not one")
        compute_end = np.full((p.pipelines, p.stages), -np.inf)
        np.maximum.at(compute_end, (a.pipeline[~m], a.stage[~m]), a.end[~m])
        steps = np.flatnonzero(m)
        early = a.start[steps] < ready[a.stage[steps]] - self.eps
        self._add(steps[early], lambda k: f"{self._op(k)} starts before its gradients are ready")
        last_op = a.start[steps] < compute_end[a.pipeline[steps], a.stage[steps]] - self.eps
        self._add(steps[last_op], lambda k: f"{self._op(k)} is not the worker's last op")

    def workers(self, a: OpArrays, tag: str) -> None:
        """Check that every worker runs one op at a time and stays within its memory limit.

        tag: text before each error."""
        p = self.p
        worker = a.pipeline.astype(np.int64) * p.stages + a.stage
        longer = np.flatnonzero(a.end > a.start + self.eps)
        order = longer[np.lexsort((a.end[longer], a.start[longer], worker[longer]))]
        w, start, end = worker[order], a.start[order], a.end[order]
        late = np.flatnonzero((w[1:] == w[:-1]) & (start[1:] < end[:-1] - self.eps))
        self._add(late, lambda k: f"{tag}worker {self._worker(w[k])} runs two ops at time {start[k + 1]:g}")
        self._memory(a, tag)

    def _memory(self, a: OpArrays, tag: str) -> None:
        """Check that no worker has more micro-batches in flight than its limit."""
        p, x = self.p, in_flight(self.p, a)
        over = np.flatnonzero((x.change > 0) & (x.level > p.limits[x.worker] + LENGTH))

        def sentence(k: int) -> str:
            w = self._worker(x.worker[k])
            return f"{tag}worker {w} holds {x.level[k]:g} micro-batches at {x.time[k]:g}, limit {p.limit(w):g}"

        self._add(over, sentence)


def _bits(kinds: Iterable[OpKind]) -> int:
    """The bits of `kinds`, as in `Progress.kinds`."""
    return sum(BIT[kind] for kind in kinds)


def _letters(bits: int) -> str:
    """The kinds in `bits` as text, such as "FI"."""
    return "".join(kind for kind in COMPUTE if bits & BIT[kind]) or "nothing"
