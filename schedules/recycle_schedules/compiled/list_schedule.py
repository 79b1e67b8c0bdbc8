"""List scheduling: simulates the step, with each free worker running the ready op with the least key.

    codes, starts, peaks = simulate(...)

Written for numba, also runs as plain Python. Times are whole ticks, and workers choose their next op only after all
events of a tick. So the result depends neither on rounding nor on the order of events.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from ..op_kinds import B, F, I, W
from ..progress import NEED_F, NEED_G, NEED_W, SENT_B, SENT_F

SLOTS = 1024
"""Number of recent times whose events `simulate` can find again. A power of two."""


@register_jitable
def simulate(
    stages, host, todo, sent, duration, cap, held, release, travel, i_release,
    key_f, key_g, g_first, window, patience, rush, fuse,
):  # fmt: skip
    """Simulate a step with one policy.

    Returns (codes, starts, peaks), with the ops in order of their starts:
    codes (n_ops,)     int64: node * 4 + kind
    starts (n_ops,)    int64: ticks
    peaks (w,)         peak number of micro-batches in flight on each worker

    host (n,)          worker of each node
    todo ... travel    as in Instance
    key_f, key_g (n,)  priority among the ready F, and among the ready I; least key first
    g_first            whether a ready I runs before a ready F
    window (w,)        maximum number of micro-batches between F and I (or B). Those that wait for their W do not count
    patience           an F waits while this many W or more are pending; a W always runs if no other op can
    rush               if the worker has at most this many F left to start, a ready F runs before an I. If the F does
                       not fit into memory, a W runs before the I to make room
    fuse (w,)          whether to run B instead of I and W

    This is one long function, because on a call numba counts the references to the arrays passed, unless the called
    function contains no loop. With smaller functions, these atomic operations took two thirds of the time. For the same
    reason, the code that adds heap entries occurs once for each of the two kinds of heaps, and so does the code that
    removes them.
    """
    n, workers = len(host), len(cap)
    stage = (np.arange(workers) % stages).astype(np.int32)  # a look-up is faster than a division
    host = host.astype(np.int32)  # int32 causes half as many cache misses as int64
    alike = len(travel) == 1  # as in `timing.travel_time`
    total = np.int64(0)  # in plain Python, a sum of uint8 elements of `todo` would overflow
    # one segment of `pending` and two of `ready` per worker: its pending W; its ready F, and its ready I
    first = np.zeros(workers + 1, dtype=np.int32)
    for v in range(n):
        if todo[v]:
            first[host[v] + 1] += 1
            total += 1 if todo[v] & NEED_F else 0
            total += 1 if todo[v] & NEED_G else 0
            total += 1 if todo[v] & NEED_W else 0
    for w in range(workers):
        first[w + 1] += first[w]
    ready = np.empty(2 * first[workers] + 1, dtype=np.int64)  # heaps of key << 32 | node
    pending = np.empty(first[workers] + 1, dtype=np.int32)
    size_f = np.zeros(workers, dtype=np.int32)
    size_g = np.zeros(workers, dtype=np.int32)
    w_in = np.zeros(workers, dtype=np.int32)
    w_out = np.zeros(workers, dtype=np.int32)
    flying, peaks = held.copy(), held.copy()
    left = np.zeros(workers, dtype=np.int32)  # F still to start
    away = np.zeros(workers, dtype=np.int32)  # micro-batches between F and I
    idle = np.ones(workers, dtype=np.uint8)
    running = np.full(workers, -1, dtype=np.int32)  # code of the worker's last op, -1 before the first one
    wait_g = np.zeros(n, dtype=np.uint8)  # number of inputs (F, gradient) that each node's backward waits for
    codes = np.empty(total, dtype=np.int64)
    starts = np.empty(total, dtype=np.int64)
    touched = np.empty(workers, dtype=np.int32)
    is_touched = np.zeros(workers, dtype=np.uint8)
    arrived = np.empty(2 * n + 1, dtype=np.int32)  # node * 2, + 1 for the backward: ops that became ready in this tick

    # Event w: worker w is free. Event workers + node * 2, + 1 for the gradient: a message arrives at the node. Equal
    # workers run in lockstep, so most events share their time with others. A bucket is the chain of all events at one
    # time. The heap contains buckets, so few events cost a heap operation.
    times = np.empty(workers + 2 * n + 1, dtype=np.int64)  # time of each bucket of the heap
    roots = np.empty(workers + 2 * n + 1, dtype=np.int32)  # first event of each bucket of the heap
    after = np.empty(workers + 2 * n + 1, dtype=np.int32)  # next event of the bucket, -1 if there is none
    known = np.full(SLOTS, -1, dtype=np.int64)  # a recent time, by its hash; -1: none
    bucket = np.zeros(SLOTS, dtype=np.int32)  # first event of its bucket
    new_times = np.empty(workers + 2 * n + 1, dtype=np.int64)  # events that were added in this tick
    new_events = np.empty(workers + 2 * n + 1, dtype=np.int32)
    n_buckets = n_new = n_arrived = n_touched = n_ops = 0

    for v in range(n):  # ops that are ready at time 0
        w = host[v]
        s = stage[w]
        needs_f = 1 if todo[v] & NEED_F else 0
        left[w] += needs_f
        if needs_f and (s == 0 or sent[v - 1] & SENT_F):
            arrived[n_arrived] = 2 * v
            n_arrived += 1
        if todo[v] & NEED_G:
            away[w] += 1 - needs_f
            wait_g[v] = needs_f
            if s < stages - 1 and not sent[v + 1] & SENT_B:
                wait_g[v] += 1
            if wait_g[v] == 0:
                arrived[n_arrived] = 2 * v + 1
                n_arrived += 1
        elif todo[v] & NEED_W:
            pending[first[w] + w_in[w]] = v
            w_in[w] += 1
    for w in range(workers):
        if first[w + 1] > first[w]:
            idle[w] = 0
            new_times[n_new], new_events[n_new] = release[w], w
            n_new += 1

    now = np.int64(0)
    while True:
        for k in range(n_arrived):  # add the ready ops to their workers' heaps
            v = arrived[k] >> 1
            w = host[v]
            if arrived[k] & 1:
                base, i, entry = first[w] + first[w + 1], size_g[w], (key_g[v] << 32) | v
                size_g[w] += 1
            else:
                base, i, entry = 2 * first[w], size_f[w], (key_f[v] << 32) | v
                size_f[w] += 1
            while i > 0:
                up = (i - 1) >> 1
                if ready[base + up] <= entry:
                    break
                ready[base + i] = ready[base + up]
                i = up
            ready[base + i] = entry
            if not is_touched[w]:
                is_touched[w] = 1
                touched[n_touched] = w
                n_touched += 1
        n_arrived = 0

        for k in range(n_touched):  # start an op on each idle worker that can run one
            w = touched[k]
            is_touched[w] = 0
            if not idle[w]:
                continue
            can_f = size_f[w] > 0 and flying[w] + 1.0 <= cap[w] + 1e-6 and away[w] < window[w]
            hurry = size_f[w] > 0 and left[w] <= rush and away[w] < window[w]
            can_g = size_g[w] > 0
            n_pending = w_in[w] - w_out[w]
            kind = -1
            if hurry and can_f:
                kind = F
            elif hurry and n_pending > 0:
                kind = W
            elif can_g and (g_first or not can_f):
                kind = I
            elif can_f and n_pending < patience:
                kind = F
            elif can_g:
                kind = I
            elif n_pending > 0:
                kind = W
            elif can_f:
                kind = F
            if kind == -1:
                continue
            if kind == W:
                v = pending[first[w] + w_out[w]]
                w_out[w] += 1
            else:
                if kind == F:
                    base, size = 2 * first[w], size_f[w] - 1
                    size_f[w] = size
                else:
                    base, size = first[w] + first[w + 1], size_g[w] - 1
                    size_g[w] = size
                v, last, i = ready[base] & 0xFFFFFFFF, ready[base + size], 0
                while True:  # remove the least entry from the heap
                    child = 2 * i + 1
                    if child >= size:
                        break
                    if child + 1 < size and ready[base + child + 1] < ready[base + child]:
                        child += 1
                    if ready[base + child] >= last:
                        break
                    ready[base + i] = ready[base + child]
                    i = child
                ready[base + i] = last
                if kind == F:
                    flying[w] += 1.0
                    peaks[w] = max(peaks[w], flying[w])
                    away[w] += 1
                    left[w] -= 1
                elif fuse[w] and todo[v] & NEED_W:
                    kind = B
            idle[w] = 0
            codes[n_ops], starts[n_ops] = v * 4 + kind, now
            n_ops += 1
            running[w] = v * 4 + kind
            new_times[n_new], new_events[n_new] = now + duration[kind, w], w
            n_new += 1
        n_touched = 0

        for k in range(n_new):  # add the new events
            time, event = new_times[k], new_events[k]
            slot = (time ^ time >> 10 ^ time >> 20) & (SLOTS - 1)
            if known[slot] == time:
                after[event] = after[bucket[slot]]
                after[bucket[slot]] = event
                continue
            known[slot], bucket[slot], after[event] = time, event, -1  # may overwrite another time
            i = n_buckets
            while i > 0:
                up = (i - 1) >> 1
                if times[up] <= time:
                    break
                times[i], roots[i] = times[up], roots[up]
                i = up
            times[i], roots[i] = time, event
            n_buckets += 1
        n_new = 0

        if not n_buckets:
            break
        now = times[0]
        while n_buckets and times[0] == now:  # handle all events of the next tick
            event = roots[0]
            slot = (now ^ now >> 10 ^ now >> 20) & (SLOTS - 1)
            if known[slot] == now:
                known[slot] = -1
            n_buckets -= 1
            time, root, i = times[n_buckets], roots[n_buckets], 0
            while True:
                child = 2 * i + 1
                if child >= n_buckets:
                    break
                if child + 1 < n_buckets and times[child + 1] < times[child]:
                    child += 1
                if times[child] >= time:
                    break
                times[i], roots[i] = times[child], roots[child]
                i = child
            times[i], roots[i] = time, root
            while event >= 0:
                if event >= workers:
                    v, back = (event - workers) >> 1, (event - workers) & 1
                    if back:
                        wait_g[v] -= 1
                    if not back or wait_g[v] == 0:
                        arrived[n_arrived] = event - workers
                        n_arrived += 1
                    event = after[event]
                    continue
                w = event
                event = after[event]
                idle[w] = 1
                if not is_touched[w]:
                    is_touched[w] = 1
                    touched[n_touched] = w
                    n_touched += 1
                if running[w] < 0:
                    continue
                v, kind, s = running[w] >> 2, running[w] & 3, stage[w]
                if kind == F:
                    if todo[v] & NEED_G:
                        wait_g[v] -= 1
                        if wait_g[v] == 0:
                            arrived[n_arrived] = 2 * v + 1
                            n_arrived += 1
                    if s < stages - 1 and todo[v + 1] & NEED_F and not sent[v] & SENT_F:
                        u = host[v + 1]
                        lag = travel[0, 0 if u - w == 1 else 1] if alike else travel[w, u // stages]
                        if lag > 0:
                            new_times[n_new], new_events[n_new] = now + lag, workers + 2 * (v + 1)
                            n_new += 1
                        else:
                            arrived[n_arrived] = 2 * (v + 1)
                            n_arrived += 1
                    continue
                if kind == W:
                    flying[w] -= 1.0 - i_release
                    continue
                away[w] -= 1
                if kind == B:
                    flying[w] -= 1.0
                else:
                    flying[w] -= i_release
                    pending[first[w] + w_in[w]] = v
                    w_in[w] += 1
                if s > 0 and todo[v - 1] & NEED_G and not sent[v] & SENT_B:
                    u = host[v - 1]
                    lag = travel[0, 0 if w - u == 1 else 1] if alike else travel[u, w // stages]
                    if lag > 0:
                        new_times[n_new], new_events[n_new] = now + lag, workers + 2 * (v - 1) + 1
                        n_new += 1
                    else:
                        wait_g[v - 1] -= 1
                        if wait_g[v - 1] == 0:
                            arrived[n_arrived] = 2 * (v - 1) + 1
                            n_arrived += 1
    return codes[:n_ops], starts[:n_ops], peaks
