"""1F1B, the standard fault-free schedule. Its actions equal those of torch.distributed.pipelining's Schedule1F1B.

plan = one_f_one_b(Problem(pipelines=1, stages=4, microbatches=6, backward="coupled"))
"""

from __future__ import annotations

import numpy as np

from ..bounds import lower_bound
from ..compiled.timing import earliest
from ..op_kinds import B, F
from ..planner.instance import Instance
from ..planner.partial_schedule import PartialSchedule, finish
from ..plans import Plan
from ..problem import Problem


def one_f_one_b(problem: Problem) -> Plan:
    """The plan with 1F1B in every pipeline. Stage s holds at most P - s micro-batches. `memory_limit` is ignored.

    Raises ValueError if a worker is dead, the problem is a remainder, or backward is decoupled."""
    if problem.dead or problem.remainder or problem.backward == "decoupled":
        raise ValueError("1F1B needs a fault-free whole step with coupled backward")
    x = Instance.of(problem)
    P, g0 = problem.stages, 0
    host = np.repeat(x.pipeline, P) * np.int64(P) + np.tile(np.arange(P), problem.total)  # no re-routing
    sequences = []
    for m in problem.counts:
        for s in range(P):
            sequences.append([((g0 + i) * P + s) * 4 + kind for kind, i in order(P, s, m)])
        g0 += m
    length = np.array([len(sequence) for sequence in sequences])
    codes = np.array([c for sequence in sequences for c in sequence], dtype=np.int64)
    starts, topological = np.empty_like(codes), np.empty_like(codes)
    earliest(
        P, host, x.todo, x.sent, x.duration, x.release, x.travel,
        np.cumsum(length) - length, length, codes, starts, topological,
    )  # fmt: skip
    return finish(x, PartialSchedule(codes[topological], starts[topological], host), lower_bound(problem))


def order(stages: int, stage: int, microbatches: int) -> list[tuple[int, int]]:
    """The ops of one stage in execution order, as (F or B, micro-batch): P - 1 - s forwards, then alternating forwards
    and backwards, then the remaining backwards."""
    ahead = min(stages - 1 - stage, microbatches)
    out = [(F, i) for i in range(ahead)]
    for i in range(microbatches - ahead):
        out += [(F, ahead + i), (B, i)]
    return out + [(B, i) for i in range(microbatches - ahead, microbatches)]
