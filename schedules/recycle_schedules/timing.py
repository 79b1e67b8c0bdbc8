"""Times of ops whose order on every worker is given.

    starts, order = earliest(...)      # each op as soon as its worker and its inputs allow
    starts = latest(...)               # each op as late as the ends of the stages allow

Written for numba, but ordinary Python too. Times are whole ticks; an op's code is node * 4 + kind.
"""

from __future__ import annotations

import numpy as np

NEVER = 1 << 62


def earliest(stages, host, todo, sent, duration, release, send, send_rerouted, first, codes):
    """Semi-active times of the sequences codes[first[w] : first[w + 1]], one for each worker.

    Returns (starts (n_ops,) aligned with codes, order (n_ops,): positions in codes in a topological order, how many
    ops could be placed: fewer than n_ops if the sequences wait for each other in a circle)."""
    workers, n_ops = len(first) - 1, len(codes)
    end_f = np.full(len(host), -1, dtype=np.int64)
    end_g = np.full(len(host), -1, dtype=np.int64)
    free = release.copy()
    at = first[:workers].copy()
    starts = np.full(n_ops, -1, dtype=np.int64)
    order = np.empty(n_ops, dtype=np.int64)
    stack = np.empty(workers + 2 * n_ops + 1, dtype=np.int64)
    for w in range(workers):
        stack[w] = workers - 1 - w
    size, placed = workers, 0
    while size:
        size -= 1
        w = stack[size]
        while at[w] < first[w + 1]:
            k = at[w]
            v, kind = codes[k] >> 2, codes[k] & 3
            s, t = v % stages, free[w]
            if kind == 0:
                if s > 0 and not sent[v - 1] & 1:
                    if end_f[v - 1] < 0:
                        break
                    t = max(t, end_f[v - 1] + (send if w - host[v - 1] == 1 else send_rerouted))
            elif kind == 2:
                if todo[v] & 2:
                    if end_g[v] < 0:
                        break
                    t = max(t, end_g[v])
            else:
                if todo[v] & 1:
                    if end_f[v] < 0:
                        break
                    t = max(t, end_f[v])
                if s < stages - 1 and not sent[v + 1] & 2:
                    if end_g[v + 1] < 0:
                        break
                    t = max(t, end_g[v + 1] + (send if host[v + 1] - w == 1 else send_rerouted))
            starts[k] = t
            free[w] = t + duration[kind, w]
            order[placed] = k
            placed += 1
            at[w] += 1
            if kind == 0:
                end_f[v] = free[w]
                if s < stages - 1 and todo[v + 1] & 1 and host[v + 1] != w:
                    stack[size] = host[v + 1]
                    size += 1
            elif kind != 2:
                end_g[v] = free[w]
                if s > 0 and todo[v - 1] & 2:
                    stack[size] = host[v - 1]
                    size += 1
    return starts, order, placed


def latest(stages, host, todo, sent, duration, send, send_rerouted, codes, order, deadline):
    """Latest starts (n_ops,) with which every op of worker w ends by deadline[w] and the order of `earliest` is kept.

    codes, order as given to and returned by `earliest` (worker by worker; topological)."""
    n_ops = len(codes)
    must = deadline.copy()  # when the worker's next op in this backward pass has to be over
    due_f = np.full(len(host), NEVER, dtype=np.int64)  # when the output of F has to be made
    due_g = np.full(len(host), NEVER, dtype=np.int64)
    starts = np.empty(n_ops, dtype=np.int64)
    for i in range(n_ops - 1, -1, -1):
        k = order[i]
        v, kind = codes[k] >> 2, codes[k] & 3
        w, s = host[v], v % stages
        t = must[w]
        if kind == 0:
            t = min(t, due_f[v])
        elif kind != 2:
            t = min(t, due_g[v])
        t -= duration[kind, w]
        starts[k] = t
        must[w] = t
        if kind == 0:
            if s > 0 and not sent[v - 1] & 1:
                due_f[v - 1] = min(due_f[v - 1], t - (send if w - host[v - 1] == 1 else send_rerouted))
        elif kind == 2:
            if todo[v] & 2:
                due_g[v] = min(due_g[v], t)
        else:
            if todo[v] & 1:
                due_f[v] = min(due_f[v], t)
            if s < stages - 1 and not sent[v + 1] & 2:
                due_g[v + 1] = min(due_g[v + 1], t - (send if host[v + 1] - w == 1 else send_rerouted))
    return starts
