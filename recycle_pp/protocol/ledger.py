"""The state of a step: completed ops, the location of tensors, and the work left after deaths.

A worker keeps one `Record` for each uncommitted step:

    record = Record(step=7)
    record.begin(OpKind.FORWARD, (1, 0)); record.finish()      # before each op is launched; after it is done
    record.reported()                               # this record as a message, for the worker's report

The coordinator computes the remaining work from the reports of the live workers:

    left = remainder(problem, {worker: record, ...}, busy={worker: seconds})
    left.problem   # a Problem with `done`, `busy_until`, `committed`: the planner's input
    left.sources   # stage -> a live worker that holds the stage's reduced gradients

`Record` and `remainder` are pure: no sockets, no clock, no torch. The remaining work depends only on the reports of
live workers. An op is missing if and only if no live worker has done it and no live worker holds a reduced sum that
includes its gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from recycle_schedules import MicroBatch, Problem, Progress, TensorKind, Worker
from recycle_schedules.progress import BACKWARD, BIT, FORWARD

from recycle_pp.wire.messages.generations import StepRecord


@dataclass
class Record:
    """One worker's part of one step.

    done     kind of op -> micro-batches in order of completion, as one list: pipeline, index, pipeline, index, ...
    running  ops that have begun and are not known to be done, oldest first; a GPU can have several
    """

    step: int
    done: dict[str, list[int]] = field(default_factory=dict)
    running: list[tuple[str, MicroBatch]] = field(default_factory=list)
    reduced: bool = False  # whether this worker holds the stage's reduced gradients

    def begin(self, kind: str, microbatch: MicroBatch) -> None:
        self.running.append((kind, microbatch))

    def finish(self) -> None:
        """Marks the oldest running op as done."""
        kind, microbatch = self.running.pop(0)
        self.done.setdefault(kind, []).extend(microbatch)

    def reported(self) -> StepRecord:
        """This record as a message. Running ops count as done, because they cannot be stopped, and a second run by a
        peer would add their gradient twice. If they fail, the worker dies, and its reports no longer count."""
        done = {kind: [*microbatches] for kind, microbatches in self.done.items()}
        for kind, microbatch in self.running:
            done.setdefault(kind, []).extend(microbatch)
        return StepRecord(self.step, done, self.reduced)

    @classmethod
    def of(cls, reported: StepRecord) -> Record:
        return cls(step=reported.step, done=reported.done, reduced=reported.reduced)


@dataclass(frozen=True)
class Remainder:
    """The work left in a step.

    sources  stage -> a live worker that holds the stage's reduced gradients
    revoked  stages whose reduced gradients must be summed again (see `remainder`)
    """

    problem: Problem
    sources: dict[int, Worker]
    revoked: frozenset[int]
    lost: frozenset[tuple[str, MicroBatch, int]]  # ops of dead workers to repeat: ("F" or "B", micro-batch, stage)


def remainder(problem: Problem, records: Mapping[Worker, Record], busy: Mapping[Worker, float]) -> Remainder:
    """The planning problem for the rest of a step.

    problem  the planning problem, with all workers that are not live in `failed`; its fields `backward`, `done`,
             `busy_until` and `committed` are replaced
    records  live worker -> its record of this step
    busy     worker -> seconds (the problem's time unit) until the worker can start its next op

    A stage is finished (`committed` for the planner) if a live worker holds its reduced gradients, with one
    exception. If a dead worker had the only copy of a tensor that another stage still needs, the op that produces the
    tensor must run again. Its gradient would then be in the sum twice, so the reduced gradients of the stage are
    revoked. Peers reduce again from their accumulators, which they keep until the commit.
    """
    ran = _progress(problem, records)
    sources = {w.stage: w for w, r in sorted(records.items(), reverse=True) if r.reduced}
    revoked = _revoked(ran, set(sources))
    for stage in revoked:
        del sources[stage]
    left = problem.replace(
        backward="mixed",  # completed backwards may be whole or split, and splitting the rest can fill bubbles
        done=ran,
        busy_until={f"{w.pipeline},{w.stage}": t for w, t in busy.items() if t > 0},
        committed=sorted(sources),
    )
    return Remainder(left, sources, frozenset(revoked), _lost(problem, ran, set(sources)))


def _progress(problem: Problem, records: Mapping[Worker, Record]) -> Progress:
    """The completed ops of all records, in one table."""
    lists = [(BIT[kind], *worker, numbers) for worker, r in records.items() for kind, numbers in r.done.items()]
    pipeline, index = np.array(list(chain.from_iterable(x[-1] for x in lists)), np.int64).reshape(-1, 2).T
    about = np.array([x[:-1] for x in lists], np.int64).reshape(-1, 3)
    bits, pipelines, stages = np.repeat(about, [len(x[-1]) // 2 for x in lists], axis=0).T
    return Progress.ran(bits, problem.first[pipeline] + index, stages, pipelines, (problem.total, problem.stages))


def _lost(problem: Problem, ran: Progress, reduced: set[int]) -> frozenset[tuple[str, MicroBatch, int]]:
    """Ops that no live worker has done, but whose output a live worker has used. Leaves out finished stages."""
    none = np.zeros((problem.total, 1), np.uint8)
    above, below = np.c_[ran.kinds[:, 1:], none], np.c_[none, ran.kinds[:, :-1]]
    gone = (ran.host < 0) & ~np.isin(np.arange(problem.stages), list(reduced))
    keys, backward = problem.microbatch_keys(), (below & BACKWARD) != 0
    used = {TensorKind.ACTIVATION: ((above & FORWARD) != 0) | backward, TensorKind.GRADIENT: backward}
    return frozenset((kind, keys[g], s) for kind, by in used.items() for g, s in np.argwhere(gone & by).tolist())


def _revoked(ran: Progress, reduced: set[int]) -> set[int]:
    """The reduced stages that must repeat ops, because another stage needs one of their lost tensors. A revoked stage
    needs its own inputs again, so the search repeats until nothing changes, at most once per stage."""
    forward, backward = (ran.kinds & FORWARD) != 0, (ran.kinds & BACKWARD) != 0
    revoked: set[int] = set()
    while True:
        closed = reduced - revoked
        more = set()
        for stage in set(range(ran.kinds.shape[1])) - closed:
            for maker, have in ((stage - 1, forward), (stage + 1, backward)):
                if maker in closed and (~have[:, stage] & ~have[:, maker]).any():
                    more.add(maker)
        if not more:
            return revoked
        revoked |= more
