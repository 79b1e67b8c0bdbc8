"""Assigns each micro-batch at each stage to a live worker.

    host = reroute(instance)          # (n,) int64: the worker of every node

Shares are as even as speeds and existing work allow. The micro-batches that a worker takes over are spread evenly
between its own. If links differ, near peers take more of a dead worker's micro-batches (shares.py).
"""

from __future__ import annotations

import numpy as np

from ..op_kinds import SPLIT, F, I, W
from ..progress import NEED_F, NEED_G, NEED_W
from .instance import Instance
from .shares import cheapest_flow, even_shares


def reroute(x: Instance, turn: int = 0, *, by_links: bool = True) -> np.ndarray:
    """The worker of every node, (n,) int64. A node that must run on a given worker keeps it. The other nodes of a stage
    are distributed over its workers such that the stage ends as early as possible.

    turn: rotates the order of equal peers. by_links: whether message times count, if links differ."""
    P = x.stages
    host = x.host.reshape(-1, P).copy()
    free = (host < 0) & (x.todo.reshape(-1, P) != 0)
    by_links = by_links and not x.problem.graph.uniform
    for s in np.flatnonzero(free.any(axis=0)).tolist():
        host[:, s] = _hosts_of_stage(x, s, host, np.flatnonzero(free[:, s]), turn, by_links)
    finished = host < 0  # these nodes run nothing, so any worker of their stage is valid
    return np.where(finished, np.arange(P), host).reshape(-1) if finished.any() else host.reshape(-1)


def _hosts_of_stage(x: Instance, s: int, hosts: np.ndarray, free: np.ndarray, turn: int, by_links: bool) -> np.ndarray:
    """The worker of each micro-batch at stage s, (N,). Each pipeline keeps its own micro-batches up to its share. The
    others go to peers with room, round-robin or according to link times.

    hosts           (N, P): worker of each micro-batch at each stage, -1 if not assigned yet or finished. Complete for
                    the open nodes of the stages before s
    free            the micro-batches to assign
    turn, by_links  as for `reroute`"""
    P, D = x.stages, x.problem.pipelines
    workers = np.arange(D) * P + s
    cost = x.duration[: len(SPLIT), workers].sum(axis=0)
    todo = x.todo.reshape(-1, P)[:, s]
    host = hosts[:, s]
    fixed = np.flatnonzero((host >= 0) & (todo != 0))
    load = x.release[workers].astype(np.int64)
    for bit, kind in ((NEED_F, F), (NEED_G, I), (NEED_W, W)):
        has = fixed[(todo[fixed] & bit) != 0]
        np.add.at(load, host[has] // P, x.duration[kind, host[has]])
    able = [d for d in range(D) if x.alive[workers[d]] and x.cap[workers[d]] >= 1]
    room = np.zeros(D, dtype=np.int64)
    room[able] = even_shares(load[able].tolist(), cost[able].tolist(), len(free), turn)
    out = host.copy()
    order = free[np.lexsort((x.pipeline[free], x.index[free]))]
    leaving: list[int] = []
    for d in range(D):  # the micro-batches that leave a pipeline are spread evenly over its indices
        own = order[x.pipeline[order] == d]
        stay = min(len(own), int(room[d]))
        if len(own):
            keep = np.zeros(len(own), dtype=bool)
            keep[(np.arange(stay) * len(own)) // max(stay, 1)] = True
            out[own[keep]] = workers[d]
            leaving += own[~keep].tolist()
            room[d] -= stay
            load[d] += stay * cost[d]
    where = {g: k for k, g in enumerate(order.tolist())}
    leaving.sort(key=lambda g: where[g])
    if by_links and leaving:
        out[leaving] = workers[_along_links(x, s, hosts, np.array(leaving), load, cost, np.roll(able, -turn))]
        return out
    takers = _round_robin(room.tolist(), turn)
    for g, d in zip(leaving, takers, strict=True):
        out[g] = workers[d]
    return out


def _along_links(
    x: Instance, s: int, hosts: np.ndarray, leaving: np.ndarray, load: np.ndarray, cost: np.ndarray, able: np.ndarray
) -> np.ndarray:
    """The pipeline that takes each of the micro-batches `leaving` (n,) at stage s, (n,). Chosen from `able`.

    load, cost: time of each pipeline's existing work and of one more micro-batch, (D,) ticks."""
    P = x.stages
    todo = x.todo.reshape(-1, P)[:, s]
    # a finished node of the stage before counts as run by pipeline 0
    before = np.maximum(hosts[leaving, s - 1], 0) // P if s > 0 else np.zeros(len(leaving), dtype=np.int64)
    after = np.full(len(leaving), -1)  # -1: not assigned yet
    if s < P - 1:
        after = np.where(hosts[leaving, s + 1] >= 0, hosts[leaving, s + 1] // P, -1)
        own = x.pipeline[leaving]
        after = np.where((after < 0) & x.alive[own * P + s + 1], own, after)
    # number of directions, forward and backward, in which the micro-batch still has to travel
    ways = np.minimum(todo[leaving] & NEED_F, 1) + ((todo[leaving] & NEED_G) != 0)
    kinds, group, count = np.unique(
        np.stack([before, after, ways.astype(np.int64)], axis=1), axis=0, return_inverse=True, return_counts=True
    )
    message = np.zeros((len(kinds), len(able)), dtype=np.int64)
    for k, (b, a, n) in enumerate(kinds.tolist()):
        if s > 0:
            message[k] += n * x.travel[b * P + s - 1, able]
        if s < P - 1:
            onward = x.travel[able * P + s]
            live = list(x.problem.live[s + 1])
            message[k] += n * (onward[:, a] if a >= 0 else onward[:, live].min(axis=1))
    taken = cheapest_flow(count, message, load[able], cost[able])
    takers = [iter(_round_robin(row.tolist(), 0)) for row in taken]
    return able[[next(takers[k]) for k in group.reshape(-1).tolist()]]


def _round_robin(room: list[int], turn: int) -> list[int]:
    """A sequence in which each index d occurs `room[d]` times, evenly spread."""
    slots = [((2 * j + 1) / (2 * r), (d - turn) % len(room), d) for d, r in enumerate(room) if r for j in range(r)]
    return [d for _, _, d in sorted(slots)]
