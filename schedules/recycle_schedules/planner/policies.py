"""The policies of the list scheduler: tables for `compiled.portfolio.try_policies`.

    choice = Choices.of(instance)
    table = choice.table(40)         # 40 policies: first those that are best most often, then a fixed random sample

A policy sets:
- which workers host re-routed micro-batches;
- which of several ready ops runs next: by index, with re-routed ones before, after or between the worker's own;
- whether I runs before F;
- how many micro-batches may be between F and I;
- when a W must run;
- how many F are left when F get priority;
- at which stages the backward runs whole, as a B.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from .instance import Instance
from .rerouting import reroute

NO_LIMIT = 1 << 30
OWN, FOREIGN, HALF, LATE, EARLY, NEWEST = range(6)
"""Rows of `Choices.keys`: the order of the ready micro-batches of a worker.

OWN, FOREIGN: by index. Among equal indices, OWN puts the worker's own micro-batches first, FOREIGN the re-routed ones.
HALF, LATE, EARLY: by index, with the indices of re-routed micro-batches shifted by -0.5, +1.5 and -1.5.
NEWEST: the highest index first."""
TURNS, ORDERS = 3, 6
OPEN, DOUBLE, TIGHT = 0, 1, 2
"""Rows of `Choices.windows`: no limit, 2 (P - s) - 1, P - s. The rows after TIGHT are P - s + 1 to P - s + 3."""


@dataclass(frozen=True, eq=False)
class Choices:
    """The tables whose rows the columns of a policy table select. n: nodes; w: workers."""

    hosts: np.ndarray  # (1 to 7, n) int64: worker of each node; rows differ in the workers of re-routed micro-batches
    keys: np.ndarray  # (6, n) int64: priority of each node, smallest first
    windows: np.ndarray  # (6, w) int64: maximum number of micro-batches between F and I
    fuses: np.ndarray  # (1 or 3, w) bool: whether the worker runs B whole

    @classmethod
    def of(cls, x: Instance, turns: int = TURNS, orders: int = ORDERS) -> Choices:
        """The choices for an instance.

        turns    number of ways to distribute re-routed micro-batches over peers
        orders   number of rows of `keys`. A table of policies may need all of them"""
        P, D = x.stages, x.problem.pipelines
        stage = np.tile(np.arange(P), D)
        first = reroute(x, 0)
        hosts = [first] if (x.host >= 0).all() else [first, *(reroute(x, turn) for turn in range(1, turns))]
        if len(hosts) > 1 and not x.problem.graph.uniform:
            hosts += [reroute(x, turn, by_links=False) for turn in range(turns)]
        if x.problem.reroute == "any" and turns > 1:
            graph = x.problem.graph
            hosts += [reroute(at_home(x, shift)) for shift in range(1 + (graph.uniform and graph.far < graph.near))]
        index = np.repeat(x.index.astype(np.int64) * 16 + 32, P)
        foreign = np.flatnonzero(first != (x.pipeline[:, None] * np.int64(P) + np.arange(P)).reshape(-1))
        keys = np.empty((orders, len(index)), dtype=np.int64)
        for row, shift in zip(keys, (1, -1, -8, 24, -24), strict=False):
            row[:] = index
            row[foreign] += shift
        keys[NEWEST:] = index.max(initial=0) - index
        windows = [np.full(P * D, NO_LIMIT), 2 * (P - stage) - 1, *(P - stage + k for k in range(4))]
        whole = np.array(x.problem.coupled)[stage]
        always = np.ones(P * D, dtype=bool)
        fuses = [(stage == 0) | whole, always, whole] if x.problem.backward == "mixed" else [whole]
        return cls(np.array(hosts), keys, np.array(windows), np.array(fuses))

    def table(self, rows: int) -> np.ndarray:
        """The first `rows` policies, with duplicates removed: (at most rows, 8) int64, columns as in
        `compiled.portfolio.COLUMNS`."""
        return _table(rows, len(self.hosts), len(self.fuses))


def at_home(x: Instance, shift: int) -> Instance:
    """The instance with every micro-batch fixed to its own pipeline if it may stay there.

    shift: number of pipelines by which a micro-batch moves on at each stage, for networks on which messages between
    pipelines are faster."""
    P, D = x.stages, x.problem.pipelines
    stage = np.arange(P)
    there = (x.pipeline[:, None] + shift * stage) % D * P + stage
    fine = (x.host.reshape(-1, P) < 0) & x.alive[there] & (x.cap[there] >= 1)
    return replace(x, host=np.where(fine.reshape(-1), there.reshape(-1), x.host))


@lru_cache
def _table(rows: int, turns: int, fuses: int) -> np.ndarray:
    proven = [
        (0, FOREIGN, FOREIGN, 0, OPEN, NO_LIMIT, 0, 0),
        (0, OWN, OWN, 1, DOUBLE, NO_LIMIT, 4, 2),
        (0, OWN, OWN, 1, OPEN, NO_LIMIT, 3, 0),
        (0, OWN, OWN, 0, DOUBLE, NO_LIMIT, 0, 0),
        (1, OWN, OWN, 1, OPEN, NO_LIMIT, 0, 0),
        (0, OWN, OWN, 1, TIGHT, NO_LIMIT, 0, 1),
        (2, OWN, OWN, 0, OPEN, 3, 0, 0),
        (0, HALF, HALF, 1, OPEN, NO_LIMIT, 12, 0),
        (1, OWN, OWN, 1, OPEN, NO_LIMIT, 4, 0),
        (1, FOREIGN, FOREIGN, 0, OPEN, NO_LIMIT, 0, 0),
        (0, OWN, OWN, 1, OPEN, 2, 2, 0),
        (1, OWN, OWN, 1, TIGHT + 2, 1, 0, 1),
        (2, FOREIGN, NEWEST, 1, OPEN, NO_LIMIT, 4, 0),
        (0, EARLY, EARLY, 0, DOUBLE, NO_LIMIT, 4, 0),
        (2, LATE, OWN, 1, TIGHT + 1, NO_LIMIT, 0, 2),
    ]
    rng = random.Random(1)
    while len(proven) < rows:
        window = rng.choice([OPEN, OPEN, DOUBLE, TIGHT, TIGHT + 1, TIGHT + 2, TIGHT + 3])
        key = rng.choice([OWN, FOREIGN, HALF, LATE, EARLY])
        host, flag = rng.randrange(60), int(rng.random() < 0.7)
        key_g, patience = rng.choice([key, key, OWN, NEWEST]), rng.choice([NO_LIMIT, NO_LIMIT, 1, 2, 3])
        proven.append(
            (host, key, key_g, flag, window, patience, rng.choice([0, 0, 1, 2, 3, 4, 5, 6, 8, 12]), rng.randrange(3))
        )
    table = [(row[0] % turns, *row[1:7], row[7] % fuses) for row in itertools.islice(proven, rows)]
    return np.array(list(dict.fromkeys(table)), dtype=np.int64)
