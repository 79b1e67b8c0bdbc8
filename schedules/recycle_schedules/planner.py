"""The one public planning function.

    best = plan(problem)                  # good, in milliseconds
    best = plan(problem, seconds=1.0)     # keeps searching until it is provably optimal or the time is over

A pure function: the same problem gives the same plan (with `seconds`, as far as the clock lets it search).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .assign import assign
from .bounds import lower_bound
from .compiled import Loops
from .draft import Draft, finish, value
from .instance import Instance
from .plans import Plan
from .problem import Problem


@dataclass(frozen=True)
class Policy:
    """How the list scheduler chooses. `window`: most micro-batches in flight beyond P - s, None: as memory allows."""

    g_first: bool = True
    window: int | None = None
    patience: int = 1 << 30
    turn: int = 0
    foreign_first: bool = False
    double: bool = False
    fuse: str = "all"


def plan(problem: Problem, *, seconds: float = 0.0) -> Plan:
    """The best plan found. `lower_bound` says how much better one could be at most.

    seconds: time to search beyond the first plans; it stops early at a provable optimum."""
    x = Instance.of(problem)
    best = min((run(x, policy) for policy in policies(problem)), key=lambda draft: value(x, draft))
    return finish(x, best, lower_bound(problem))


def policies(p: Problem) -> list[Policy]:
    fuses = {"decoupled": ["none"], "coupled": ["all"], "mixed": ["none", "first", "all"]}[p.backward]
    out = []
    for fuse in fuses:
        for g_first in (True, False):
            for window in (None, 0, 1, 2):
                for patience in (1 << 30, 2, 1):
                    out.append(Policy(g_first, window, patience, fuse=fuse))
    return out


def run(x: Instance, policy: Policy) -> Draft:
    """The schedule of one policy."""
    P, D = x.stages, x.problem.pipelines
    host = assign(x, policy.turn)
    stage = np.tile(np.arange(P), D)
    cap = x.cap if policy.window is None else np.minimum(x.cap, np.maximum(1, P - stage + policy.window))
    key = np.repeat(x.index.astype(np.int64), P)
    key_f = key * 2 + (host // P != np.repeat(x.pipeline, P))
    W = len(cap)
    fuse = {"none": np.zeros(W, bool), "first": stage == 0, "all": np.ones(W, bool)}[policy.fuse]
    codes, starts = LOOPS.simulate(
        P, host, x.todo, x.sent, x.duration, cap, x.held, x.release, x.send, x.send_rerouted, x.problem.i_release,
        key_f, key_f, np.full(W, policy.g_first), np.full(W, policy.patience), fuse,
    )  # fmt: skip
    return Draft(codes, starts, host)


LOOPS = Loops()
