"""One-machine scheduling with heads and tails: a lower bound for any order of a worker's ops.

bound = LOOPS.one_machine(begin, head, length, tail, order, rank)

A job cannot start before its head, and its tail is the time that must follow its end. Jackson's preemptive schedule
always runs the job with the longest tail among those that can start. No schedule without preemption ends earlier, tails
included. Source: J. Carlier, The one-machine sequencing problem (1982). Written for numba, also runs as plain Python.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable


def one_machine(begin, head, length, tail, order, rank):
    """The latest completion time of any machine, if each machine has its best preemptive order.

    begin               machine k has the jobs begin[k] to begin[k + 1] - 1, sorted by head
    head, length, tail  of each job: earliest start, duration, least time from its end to the end of the schedule
    order               all jobs by descending tail
    rank                position of each job in `order`"""
    best = 0.0
    left = length.copy()
    heap = np.empty(len(head) + 1, dtype=np.int64)
    for k in range(len(begin) - 1):
        now, size, j, end = 0.0, 0, begin[k], begin[k + 1]
        while j < end or size > 0:
            if size == 0:
                now = max(now, head[j])
            while j < end and head[j] <= now:
                push(heap, size, rank[j])
                size += 1
                j += 1
            i = order[heap[0]]
            step = min(left[i], head[j] - now) if j < end else left[i]
            now += step
            left[i] -= step
            if left[i] <= 1e-12 * (1.0 + now):
                best = max(best, now + tail[i])
                pop(heap, size)
                size -= 1
    return best


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
