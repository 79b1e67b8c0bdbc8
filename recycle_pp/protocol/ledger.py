"""What of a step is done, where its tensors are, and what is left when workers die.

A worker keeps one `Record` a step that is not committed yet:

    record = Record(step=7)
    record.begin("F", (1, 0)); record.finish()      # around every op
    record.to_json()                                # its part of a report

The coordinator turns the reports of the live workers into what is left to do:

    left = remainder(problem, {worker: record, ...}, busy={worker: seconds})
    left.problem   # a Problem with `done`, `busy_until`, `committed`: the planner's input
    left.holders   # tensor -> live workers that hold it: where a re-routed op gets its inputs
    left.sources   # stage -> a live worker that holds the stage's reduced gradients

Both are pure: no sockets, no clock, no torch. Only what live workers report counts; nothing needs to be known about
the dead. An op is missing exactly if no live worker has done it and its gradient is in no reduced sum that survives.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from recycle_schedules import Action, MicroBatch, Problem, Tensor, Worker

Json = dict[str, Any]


@dataclass
class Record:
    """One worker's part of one step; `done` keeps the order of completion."""

    step: int
    done: dict[tuple[str, MicroBatch], None] = field(default_factory=dict)
    running: tuple[str, MicroBatch] | None = None
    reduced: bool = False  # this worker holds the stage's reduced gradients

    def begin(self, kind: str, microbatch: MicroBatch) -> None:
        self.running = (kind, microbatch)

    def finish(self) -> None:
        """The running op is done."""
        assert self.running is not None
        self.done[self.running] = None
        self.running = None

    def to_json(self) -> Json:
        """A running op counts as done: a live worker always completes it."""
        done = [*self.done, *([self.running] if self.running else [])]
        return {
            "step": self.step,
            "done": [[kind, *mb] for kind, mb in done],
            "reduced": self.reduced,
        }

    @classmethod
    def from_json(cls, data: Json) -> Record:
        return cls(
            step=data["step"],
            done={(kind, (d, i)): None for kind, d, i in data["done"]},
            reduced=data["reduced"],
        )


@dataclass(frozen=True)
class Remainder:
    """What is left of a step. `revoked` stages had reduced gradients that must be summed again (see `remainder`)."""

    problem: Problem
    holders: dict[Tensor, set[Worker]]
    sources: dict[int, Worker]
    revoked: frozenset[int]
    lost: frozenset[tuple[str, MicroBatch, int]]  # ops (kind F or B) that were done elsewhere and must be done again


def remainder(problem: Problem, records: Mapping[Worker, Record], busy: Mapping[Worker, float]) -> Remainder:
    """The planning problem of what is left of a step.

    problem  shape, durations, limits and `failed` (every worker that is not live now); its remainder keys are replaced
    records  the record of every live worker for this step
    busy     seconds (the problem's time unit) until a live worker can start its next op

    A stage of which a live worker holds the reduced gradients is finished (`committed` for the planner), whatever died
    since. Except where a tensor that another stage still needs went down with the dead worker that made it: the op
    that makes it again adds its gradient a second time, so the sum is revoked: peers go back to their own
    accumulators, which they keep until the commit, and reduce again.
    """
    ran: dict[tuple[MicroBatch, int], tuple[Worker, set[str]]] = {}
    holders: dict[Tensor, set[Worker]] = {}
    for worker, record in records.items():
        for kind, mb in record.done:
            ran.setdefault((mb, worker.stage), (worker, set()))[1].add(kind)
            output = made_by(kind, mb, worker.stage, problem.stages)
            if output:
                holders.setdefault(output, set()).add(worker)

    sources = {w.stage: w for w, r in sorted(records.items(), reverse=True) if r.reduced}
    revoked = _revoked(problem, ran, holders, set(sources))
    for stage in revoked:
        del sources[stage]

    done: list[Json] = []
    for (mb, stage), (worker, kinds) in ran.items():
        for kind in sorted(kinds):
            done.append({"op": kind, "microbatch": list(mb), "stage": stage, "worker": list(worker), "delivered": True})
    left = problem.replace(
        backward="mixed",  # whichever form what is done has, and the planner may fill bubbles with what is left
        done=done,
        busy_until={f"{w.pipeline},{w.stage}": t for w, t in busy.items() if t > 0},
        committed=sorted(sources),
    )
    return Remainder(left, holders, sources, frozenset(revoked), _lost(problem, ran, set(sources)))


def _lost(
    problem: Problem,
    ran: Mapping[tuple[MicroBatch, int], tuple[Worker, set[str]]],
    reduced: set[int],
) -> frozenset[tuple[str, MicroBatch, int]]:
    """Ops that no live worker ran, but whose output one has used."""
    lost = set()
    for stage in set(range(problem.stages)) - reduced:
        for mb in problem.microbatch_keys():
            if (mb, stage) in ran:
                continue
            above = ran.get((mb, stage + 1), (None, set()))[1]
            below = ran.get((mb, stage - 1), (None, set()))[1]
            backward = bool(below & {"I", "B"})
            if "F" in above or backward:
                lost.add(("F", mb, stage))
            if backward:
                lost.add(("B", mb, stage))
    return frozenset(lost)


def _revoked(
    problem: Problem,
    ran: Mapping[tuple[MicroBatch, int], tuple[Worker, set[str]]],
    holders: Mapping[Tensor, set[Worker]],
    reduced: set[int],
) -> set[int]:
    """The reduced stages that must run ops again, because a needed tensor of theirs is nowhere. Revoking a stage makes
    it need inputs in its turn: repeated until nothing changes (at most once a stage)."""
    revoked: set[int] = set()
    while True:
        more = set()
        for stage in range(problem.stages):
            if stage in reduced - revoked:
                continue
            for mb in problem.microbatch_keys():
                kinds = ran[mb, stage][1] if (mb, stage) in ran else set()
                for tensor in _missing_inputs(kinds, mb, stage, problem.stages):
                    if tensor[2] in reduced - revoked and not holders.get(tensor):
                        more.add(tensor[2])
        if not more:
            return revoked
        revoked |= more


def _missing_inputs(kinds: Collection[str], mb: MicroBatch, stage: int, stages: int) -> list[Tensor]:
    """The boundary tensors that the ops still missing from `kinds` take in."""
    need: list[Tensor] = []
    if stage > 0 and "F" not in kinds:
        need.append(("F", mb, stage - 1))
    if stage < stages - 1 and "I" not in kinds and "B" not in kinds:
        need.append(("B", mb, stage + 1))
    return need


def made_by(kind: str, mb: MicroBatch, stage: int, stages: int) -> Tensor | None:
    """The boundary tensor that an op makes, or None (W, and the two ends of a pipeline)."""
    if kind == "F" and stage < stages - 1:
        return ("F", mb, stage)
    if kind in ("I", "B") and stage > 0:
        return ("B", mb, stage)
    return None


def consumed_by(kind: str, mb: MicroBatch, stage: int, stages: int) -> Tensor | None:
    """The boundary tensor that an op takes in, or None."""
    if kind == "F" and stage > 0:
        return ("F", mb, stage - 1)
    if kind in ("I", "B") and stage < stages - 1:
        return ("B", mb, stage + 1)
    return None


def carried_by(action: Action) -> Tensor:
    """The boundary tensor that a SEND or RECV moves: a SEND is named by its maker's stage, a RECV by its taker's."""
    assert action.microbatch is not None
    kind = action.kind[-1]
    if action.kind.startswith("SEND"):
        return (kind, action.microbatch, action.stage)
    return (kind, action.microbatch, action.stage + (-1 if kind == "F" else 1))
