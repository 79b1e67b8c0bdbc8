"""Which live worker takes each micro-batch at each stage.

    host = assign(instance)          # (n,) int32, complete

Shares are as even as speeds and earlier duties allow; what a worker takes over is spread over its own micro-batches.
"""

from __future__ import annotations

import heapq

import numpy as np

from .instance import NEED_F, NEED_G, NEED_W, Instance


def assign(x: Instance, turn: int = 0) -> np.ndarray:
    """The host of every node, (n,) int32: what is fixed stays, the rest goes where the stage ends earliest.

    turn: rotates who is asked first among equals."""
    P = x.stages
    host = x.host.reshape(-1, P).copy()
    for s in range(P):
        free = np.flatnonzero((host[:, s] < 0) & (x.todo.reshape(-1, P)[:, s] != 0))
        if len(free):
            host[:, s] = _fill(x, s, host[:, s], free, turn)
        host[host[:, s] < 0, s] = s  # finished: nothing runs, any worker will do
    return host.reshape(-1)


def _fill(x: Instance, s: int, host: np.ndarray, free: np.ndarray, turn: int) -> np.ndarray:
    """One stage's hosts (N,). Own pipeline first, up to its share; then round-robin over who has room."""
    P, D = x.stages, x.problem.pipelines
    workers = np.arange(D) * P + s
    cost = x.duration[:3, workers].sum(axis=0)
    todo = x.todo.reshape(-1, P)[:, s]
    fixed = np.flatnonzero((host >= 0) & (todo != 0))
    load = x.release[workers].astype(np.int64)
    for bit, kind in ((NEED_F, 0), (NEED_G, 1), (NEED_W, 2)):
        has = fixed[(todo[fixed] & bit) != 0]
        np.add.at(load, host[has] // P, x.duration[kind, host[has]])
    able = [d for d in range(D) if x.alive[workers[d]] and x.cap[workers[d]] >= 1]
    share = _shares([int(load[d]) for d in able], [int(cost[d]) for d in able], len(free), turn)
    room = np.zeros(D, dtype=np.int64)
    room[able] = share
    out = host.copy()
    order = free[np.lexsort((x.pipeline[free], x.index[free]))]
    left: list[int] = []
    for d in range(D):  # own ones stay, those that leave are spread evenly over the pipeline
        own = order[x.pipeline[order] == d]
        stay = min(len(own), int(room[d]))
        if len(own):
            keep = np.zeros(len(own), dtype=bool)
            keep[(np.arange(stay) * len(own)) // max(stay, 1)] = True
            out[own[keep]] = workers[d]
            left += own[~keep].tolist()
            room[d] -= stay
    where = {g: k for k, g in enumerate(order.tolist())}
    left.sort(key=lambda g: where[g])
    takers = _round_robin(room.tolist(), turn)
    for g, d in zip(left, takers, strict=True):
        out[g] = workers[d]
    return out


def _shares(load: list[int], cost: list[int], n: int, turn: int) -> list[int]:
    """How many of n micro-batches each worker takes, so that the last one is done as early as possible."""
    k = len(load)
    heap = [(load[i] + cost[i], (i - turn) % k, i) for i in range(k)]
    heapq.heapify(heap)
    share = [0] * k
    for _ in range(n):
        end, tie, i = heap[0]
        share[i] += 1
        heapq.heapreplace(heap, (end + cost[i], tie, i))
    return share


def _round_robin(room: list[int], turn: int) -> list[int]:
    """The takers in turn, each as often as it has room, evenly spread over the sequence."""
    slots = [((2 * j + 1) / (2 * r), (d - turn) % len(room), d) for d, r in enumerate(room) if r for j in range(r)]
    return [d for _, _, d in sorted(slots)]
