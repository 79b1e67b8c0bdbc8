"""A planner for the simulated world, where plans must be valid and fast to make, but need not be good."""

from __future__ import annotations

from collections import Counter
from typing import Any

from recycle_schedules import Op, OpArrays, OpKind, Plan, Problem, Worker


def plan_simply(problem: Problem) -> Plan:
    """A valid plan of any problem without a memory limit: all forwards, then all backwards. Made in one pass."""
    free = {w: problem.busy.get(w, 0.0) for w in problem.workers()}
    ops: list[Op] = []
    hosts: dict[Any, Worker] = {}
    ends: dict[Any, float] = {}
    load: Counter = Counter()

    def add(kind: str, mb: Any, stage: int, after: float) -> float:
        if (mb, stage) not in hosts:
            begun = problem.begun.get((mb, stage))
            peers = [Worker(d, stage) for d in problem.live[stage]]
            own = Worker(mb[0], stage)
            hosts[mb, stage] = (
                begun.worker if begun else own if own in peers else min(peers, key=lambda w: (load[w], w))
            )
        w = hosts[mb, stage]
        load[w] += 1
        start = max(after, free[w])
        free[w] = start + 1
        ops.append(Op(OpKind(kind), mb, stage, w, start, start + 1))
        return start + 1

    todo = [s for s in range(problem.stages) if s not in problem.finished]
    for mb in problem.microbatch_keys():
        for s in todo:
            begun = problem.begun.get((mb, s))
            if not begun or "F" not in begun.kinds:
                ends["F", mb, s] = add("F", mb, s, ends.get(("F", mb, s - 1), 0.0))
    for mb in problem.microbatch_keys():
        for s in reversed(todo):
            kinds = begun.kinds if (begun := problem.begun.get((mb, s))) else frozenset()
            after = max(ends.get(("F", mb, s), 0.0), ends.get(("B", mb, s + 1), 0.0))
            if not kinds & {"I", "B"}:
                split = (mb[1] + s) % 2 == 0
                ends["B", mb, s] = add("I" if split else "B", mb, s, after)
                if split:
                    add("W", mb, s, ends["B", mb, s])
            elif "I" in kinds and "W" not in kinds:
                add("W", mb, s, 0.0)
    return Plan(problem, OpArrays.of(problem, ops))
