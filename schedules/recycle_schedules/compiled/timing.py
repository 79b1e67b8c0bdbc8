"""Start times of ops with a fixed order on every worker.

    placed = earliest(..., starts, order)      # each op as early as its worker and its inputs allow
    latest(..., starts)                        # each op as late as the workers' deadlines allow

Written for numba, also runs as plain Python. Times are whole ticks. An op's code is node * 4 + kind.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from ..op_kinds import B, F, W
from ..progress import NEED_F, NEED_G, SENT_B, SENT_F

NEVER = 1 << 62


@register_jitable
def stage_times(stages, host, duration, codes, starts):
    """Returns (ends, first).

    ends (P,): end of each stage's last gradient, 0 if there is none.
    first (w,): start of each worker's first op, NEVER if the worker is idle."""
    ends = np.zeros(stages, dtype=np.int64)
    first = np.full(duration.shape[1], NEVER, dtype=np.int64)
    last = np.zeros(duration.shape[1], dtype=np.int64)  # end of each worker's last gradient
    for i in range(len(codes)):
        kind, w = codes[i] & 3, host[codes[i] >> 2]
        first[w] = min(first[w], starts[i])
        if kind in (W, B):
            last[w] = max(last[w], starts[i] + duration[kind, w])
    for w in range(len(last)):
        ends[w % stages] = max(ends[w % stages], last[w])
    return ends, first


@register_jitable
def travel_time(travel, stages, u, w):
    """Message time between workers u and w of adjacent stages, in either direction. w is at the later stage.

    travel: (D * P, D), indexed by worker u and the pipeline of w. It is (1, 2) if the times are the same for all
    workers: the time within a pipeline, and the time between two pipelines."""
    if len(travel) == 1:
        return travel[0, 0] if w - u == 1 else travel[0, 1]
    return travel[u, w // stages]


@register_jitable
def earliest(stages, host, todo, sent, duration, release, travel, first, length, codes, starts, order):
    """Compute the earliest (semi-active) start times of the sequences codes[first[w] : first[w] + length[w]].

    Fills `starts` (aligned with codes) and `order` (indices into codes, topological). Returns the number of ops placed,
    which is less than all if the sequences have a cyclic dependency."""
    workers = len(first)
    total = length.sum()
    end_f = np.full(len(host), -1, dtype=np.int64)
    end_g = np.full(len(host), -1, dtype=np.int64)
    free = release.copy()
    at = np.zeros(workers, dtype=np.int64)
    stack = np.empty(workers + 2 * total + 1, dtype=np.int64)
    for w in range(workers):
        stack[w] = workers - 1 - w
    size, placed = workers, 0
    while size:
        size -= 1
        w = stack[size]
        while at[w] < length[w]:
            k = first[w] + at[w]
            v, kind = codes[k] >> 2, codes[k] & 3
            s, t = v % stages, free[w]
            if kind == F:
                if s > 0 and not sent[v - 1] & SENT_F:
                    if end_f[v - 1] < 0:
                        break
                    t = max(t, end_f[v - 1] + travel_time(travel, stages, host[v - 1], w))
            elif kind == W:
                if todo[v] & NEED_G:
                    if end_g[v] < 0:
                        break
                    t = max(t, end_g[v])
            else:
                if todo[v] & NEED_F:
                    if end_f[v] < 0:
                        break
                    t = max(t, end_f[v])
                if s < stages - 1 and not sent[v + 1] & SENT_B:
                    if end_g[v + 1] < 0:
                        break
                    t = max(t, end_g[v + 1] + travel_time(travel, stages, w, host[v + 1]))
            starts[k] = t
            t += duration[kind, w]
            free[w] = t
            order[placed] = k
            placed += 1
            at[w] += 1
            if kind == F:
                end_f[v] = t
                if s < stages - 1 and todo[v + 1] & NEED_F:
                    stack[size] = host[v + 1]
                    size += 1
            elif kind != W:
                end_g[v] = t
                if s > 0 and todo[v - 1] & NEED_G:
                    stack[size] = host[v - 1]
                    size += 1
    return placed


@register_jitable
def latest(stages, host, todo, sent, duration, travel, codes, order, placed, deadline, starts):
    """Compute the latest start times in the order of `earliest` such that every op of worker w ends by deadline[w].

    codes, order and placed come from `earliest`. Fills `starts` (aligned with codes)."""
    must = deadline.copy()  # by worker: latest end of the op that the loop visits next
    due_f = np.full(len(host), NEVER, dtype=np.int64)  # latest end of F
    due_g = np.full(len(host), NEVER, dtype=np.int64)
    for i in range(placed - 1, -1, -1):
        k = order[i]
        v, kind = codes[k] >> 2, codes[k] & 3
        w, s = host[v], v % stages
        t = must[w]
        if kind == F:
            t = min(t, due_f[v])
        elif kind != W:
            t = min(t, due_g[v])
        t -= duration[kind, w]
        starts[k] = t
        must[w] = t
        if kind == F:
            if s > 0 and not sent[v - 1] & SENT_F:
                due_f[v - 1] = min(due_f[v - 1], t - travel_time(travel, stages, host[v - 1], w))
        elif kind == W:
            if todo[v] & NEED_G:
                due_g[v] = min(due_g[v], t)
        else:
            if todo[v] & NEED_F:
                due_f[v] = min(due_f[v], t)
            if s < stages - 1 and not sent[v + 1] & SENT_B:
                due_g[v + 1] = min(due_g[v + 1], t - travel_time(travel, stages, w, host[v + 1]))
