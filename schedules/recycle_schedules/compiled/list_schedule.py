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
from .timing import travel_time

ARRIVED_F, ARRIVED_G, FREE = 4, 5, 7
"""Numbers of events: an input of F arrived, an input of I or B arrived, a worker is free. If an op ends, the number of
the event is the op's kind. An event's code is node * 8 + number, or worker * 8 + FREE."""


@register_jitable
def push(heap, size, value):
    """Add a value to the binary min-heap heap[:size]. The caller adds 1 to size."""
    i = size
    while i > 0:
        up = (i - 1) >> 1
        if heap[up] <= value:
            break
        heap[i] = heap[up]
        i = up
    heap[i] = value


@register_jitable
def pop(heap, size):
    """Remove and return the least value of heap[:size]. The caller subtracts 1 from size."""
    least, last = heap[0], heap[size - 1]
    size -= 1
    i = 0
    while True:
        child = 2 * i + 1
        if child >= size:
            break
        if child + 1 < size and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= last:
            break
        heap[i] = heap[child]
        i = child
    if size > 0:
        heap[i] = last
    return least


@register_jitable
def push_event(times, codes, size, time, code):
    """Add (time, code) to a min-heap, which is kept in two parallel arrays and ordered by time. The caller adds 1 to
    size."""
    i = size
    while i > 0:
        up = (i - 1) >> 1
        if times[up] <= time:
            break
        times[i], codes[i] = times[up], codes[up]
        i = up
    times[i], codes[i] = time, code


@register_jitable
def pop_event(times, codes, size):
    """Remove the first event. The caller reads the event at index 0 before the call, and subtracts 1 from size."""
    size -= 1
    time, code = times[size], codes[size]
    i = 0
    while True:
        child = 2 * i + 1
        if child >= size:
            break
        if child + 1 < size and times[child + 1] < times[child]:
            child += 1
        if times[child] >= time:
            break
        times[i], codes[i] = times[child], codes[child]
        i = child
    times[i], codes[i] = time, code


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
    """
    n, workers = len(host), len(cap)
    # three shared arrays hold every worker's ready F, ready I and pending W, one segment per worker
    first = np.zeros(workers + 1, dtype=np.int64)
    total = np.int64(0)  # in plain Python, a sum of uint8 elements of `todo` would overflow
    for v in range(n):
        if todo[v]:
            first[host[v] + 1] += 1
            for need in (NEED_F, NEED_G, NEED_W):
                if todo[v] & need:
                    total += 1
    for w in range(workers):
        first[w + 1] += first[w]
    ready_f = np.empty(first[workers] + 1, dtype=np.int64)
    ready_g = np.empty(first[workers] + 1, dtype=np.int64)
    pending = np.empty(first[workers] + 1, dtype=np.int64)
    size_f = np.zeros(workers, dtype=np.int64)
    size_g = np.zeros(workers, dtype=np.int64)
    w_in = np.zeros(workers, dtype=np.int64)
    w_out = np.zeros(workers, dtype=np.int64)
    flying, peaks = held.copy(), held.copy()
    left = np.zeros(workers, dtype=np.int64)  # F still to start
    away = np.zeros(workers, dtype=np.int64)  # micro-batches between F and I
    idle = np.ones(workers, dtype=np.uint8)
    wait_g = np.zeros(n, dtype=np.uint8)  # number of inputs (F, gradient) that each node's backward waits for
    codes = np.empty(total, dtype=np.int64)
    starts = np.empty(total, dtype=np.int64)
    times = np.empty(workers + 2 * n + 2, dtype=np.int64)
    events = np.empty(workers + 2 * n + 2, dtype=np.int64)
    touched = np.empty(workers, dtype=np.int64)
    is_touched = np.zeros(workers, dtype=np.uint8)
    n_events = n_touched = n_ops = 0

    for v in range(n):  # ops that are ready at time 0
        s, w = v % stages, host[v]
        needs_f = 1 if todo[v] & NEED_F else 0
        left[w] += needs_f
        if needs_f and (s == 0 or sent[v - 1] & SENT_F):
            push(ready_f[first[w] : first[w + 1]], size_f[w], (key_f[v] << 32) | v)
            size_f[w] += 1
        if todo[v] & NEED_G:
            away[w] += 1 - needs_f
            wait_g[v] = needs_f
            if s < stages - 1 and not sent[v + 1] & SENT_B:
                wait_g[v] += 1
            if wait_g[v] == 0:
                push(ready_g[first[w] : first[w + 1]], size_g[w], (key_g[v] << 32) | v)
                size_g[w] += 1
        elif todo[v] & NEED_W:
            pending[first[w] + w_in[w]] = v
            w_in[w] += 1
    for w in range(workers):
        if first[w + 1] > first[w]:
            idle[w] = 0
            push_event(times, events, n_events, release[w], w * 8 + FREE)
            n_events += 1

    while n_events:
        now = times[0]
        while n_events and times[0] == now:
            code = events[0]
            pop_event(times, events, n_events)
            n_events -= 1
            v, what = code >> 3, code & 7
            if what == FREE:
                w = v
                idle[w] = 1
            else:
                w, s = host[v], v % stages
                arrived = what in (ARRIVED_F, ARRIVED_G)  # otherwise an op of w has ended
                if not arrived:
                    idle[w] = 1
                    if what in (W, B):
                        flying[w] -= 1.0 - i_release if what == W else 1.0
                    if what == F:
                        if todo[v] & NEED_G:
                            wait_g[v] -= 1
                            if wait_g[v] == 0:
                                push(ready_g[first[w] : first[w + 1]], size_g[w], (key_g[v] << 32) | v)
                                size_g[w] += 1
                        u = v + 1
                        if s < stages - 1 and todo[u] & NEED_F and not sent[v] & SENT_F:
                            lag = travel_time(travel, stages, w, host[u])
                            push_event(times, events, n_events, now + lag, u * 8 + ARRIVED_F)
                            n_events += 1
                    elif what != W:
                        away[w] -= 1
                        if what == I:
                            flying[w] -= i_release
                            pending[first[w] + w_in[w]] = v
                            w_in[w] += 1
                        u = v - 1
                        if s > 0 and todo[u] & NEED_G and not sent[v] & SENT_B:
                            lag = travel_time(travel, stages, host[u], w)
                            push_event(times, events, n_events, now + lag, u * 8 + ARRIVED_G)
                            n_events += 1
                elif what == ARRIVED_F:
                    push(ready_f[first[w] : first[w + 1]], size_f[w], (key_f[v] << 32) | v)
                    size_f[w] += 1
                else:
                    wait_g[v] -= 1
                    if wait_g[v] == 0:
                        push(ready_g[first[w] : first[w + 1]], size_g[w], (key_g[v] << 32) | v)
                        size_g[w] += 1
            if not is_touched[w]:
                is_touched[w] = 1
                touched[n_touched] = w
                n_touched += 1
        for k in range(n_touched):
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
            if kind == W:
                v = pending[first[w] + w_out[w]]
                w_out[w] += 1
            elif kind == F:
                v = pop(ready_f[first[w] : first[w + 1]], size_f[w]) & 0xFFFFFFFF
                size_f[w] -= 1
                flying[w] += 1.0
                peaks[w] = max(peaks[w], flying[w])
                away[w] += 1
                left[w] -= 1
            elif kind == I:
                v = pop(ready_g[first[w] : first[w + 1]], size_g[w]) & 0xFFFFFFFF
                size_g[w] -= 1
                if fuse[w] and todo[v] & NEED_W:
                    kind = B
            else:
                continue
            idle[w] = 0
            codes[n_ops], starts[n_ops] = v * 4 + kind, now
            n_ops += 1
            push_event(times, events, n_events, now + duration[kind, w], v * 8 + kind)
            n_events += 1
        n_touched = 0
    return codes[:n_ops], starts[:n_ops], peaks
