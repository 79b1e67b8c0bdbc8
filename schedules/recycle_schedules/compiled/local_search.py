"""Local search on the workers' sequences by simulated annealing.

    best = improve(...)

A step of the search picks a critical op (one that delays the end if it starts later). It moves the op within its
worker's sequence, swaps two micro-batches of a stage, moves one to a peer, splits a B, or joins an I and its W. Then it
retimes all sequences and keeps or reverts the change. The energy is the objective plus the mean lateness of the workers
against the target. So among plans with equal values, the one with fewer late workers wins.

Written for numba, also runs as plain Python. All sequences share one array: worker w has
codes[first[w] : first[w] + length[w]].
"""

from __future__ import annotations

import math

import numpy as np
from numba.extending import register_jitable

from ..op_kinds import B, F, I, W
from ..progress import NEED_G
from .timing import earliest, latest


@register_jitable
def draw(state, n):
    """A pseudo-random number in 0..n-1. Advances `state`, (1,) int64."""
    state[0] = (state[0] * 1103515245 + 12345) & 0x7FFFFFFF
    high = state[0] >> 12
    state[0] = (state[0] * 1103515245 + 12345) & 0x7FFFFFFF
    return ((high << 16) ^ (state[0] >> 12)) % n


@register_jitable
def fits(codes, begin, end, flying, cap, i_release):
    """Whether the sequence codes[begin:end] stays within its worker's memory limit.

    flying: micro-batches in flight before the sequence."""
    for k in range(begin, end):
        kind = codes[k] & 3
        if kind == F:
            flying += 1.0
            if flying > cap + 1e-6:
                return False
        elif kind == I:
            flying -= i_release
        elif kind == W:
            flying -= 1.0 - i_release
        else:
            flying -= 1.0
    return True


@register_jitable
def move(codes, i, j):
    """Move the op at position i to position j. If it would pass another op of its node, change nothing and return
    False."""
    x = codes[i]
    step = 1 if j > i else -1
    for k in range(i + step, j + step, step):
        if codes[k] >> 2 == x >> 2:
            return False
    for k in range(i, j, step):
        codes[k] = codes[k + step]
    codes[j] = x
    return True


@register_jitable
def positions(codes, begin, end, v, where):
    """Set where[kind] to the position of node v's op of that kind in codes[begin:end], -1 if there is none."""
    where[:] = -1
    for k in range(begin, end):
        if codes[k] >> 2 == v:
            where[codes[k] & 3] = k


@register_jitable
def exchange(codes, first, length, host, u, v, at_u, at_v):
    """Swap the positions and workers of nodes u and v. If they have different kinds of ops, change nothing and return
    False."""
    a, b = host[u], host[v]
    positions(codes, first[a], first[a] + length[a], u, at_u)
    positions(codes, first[b], first[b] + length[b], v, at_v)
    for kind in range(4):
        if (at_u[kind] < 0) != (at_v[kind] < 0):
            return False
    for kind in range(4):
        if at_u[kind] >= 0:
            codes[at_u[kind]], codes[at_v[kind]] = v * 4 + kind, u * 4 + kind
    host[u], host[v] = b, a
    return True


@register_jitable
def give(codes, first, length, host, starts, v, w, at):
    """Move node v to worker w. Its ops go into w's sequence according to their current start times."""
    a = host[v]
    positions(codes, first[a], first[a] + length[a], v, at)
    k = first[w]
    for kind in (F, I, B, W):
        if at[kind] < 0:
            continue
        while k < first[w] + length[w] and starts[k] <= starts[at[kind]]:
            k += 1
        for i in range(first[w] + length[w], k, -1):
            codes[i] = codes[i - 1]
            starts[i] = starts[i - 1]
        codes[k] = v * 4 + kind
        starts[k] = starts[at[kind]]
        length[w] += 1
        k += 1
    kept = first[a]
    for i in range(first[a], first[a] + length[a]):
        if codes[i] >> 2 != v:
            codes[kept] = codes[i]
            kept += 1
    length[a] = kept - first[a]
    host[v] = w


@register_jitable
def refit(codes, first, length, w, i):
    """Split the B at position i of worker w into I and W, or join the I at that position with its W."""
    end = first[w] + length[w]
    v = codes[i] >> 2
    if codes[i] & 3 == B:
        for k in range(end, i + 1, -1):
            codes[k] = codes[k - 1]
        codes[i] = v * 4 + I
        codes[i + 1] = v * 4 + W
        length[w] += 1
    else:
        codes[i] = v * 4 + B
        k = i + 1
        while codes[k] != v * 4 + W:
            k += 1
        for j in range(k, end - 1):
            codes[j] = codes[j + 1]
        length[w] -= 1


@register_jitable
def energy(stages, host, duration, first, length, codes, starts, lag, target, ends):
    """Returns (value, late). Fills `ends` (P,) with the end of each stage's last gradient.

    value: the maximum, over all workers w, of ends[stage of w] + lag[w].
    late: the sum, over all workers w, of the time by which (end of w's last op) + lag[w] exceeds `target`."""
    workers = len(first)
    ends[:] = 0
    for w in range(workers):
        if length[w]:
            k = first[w] + length[w] - 1
            ends[w % stages] = max(ends[w % stages], starts[k] + duration[codes[k] & 3, w])
    value, late = 0, 0
    for w in range(workers):
        if length[w]:
            k = first[w] + length[w] - 1
            value = max(value, ends[w % stages] + lag[w])
            late += max(0, starts[k] + duration[codes[k] & 3, w] + lag[w] - target)
    return value, late


def improve(
    stages, host, free, todo, sent, duration, cap, held, release, travel, i_release, mixed,
    lag, target, first, length, codes, starts, order, iterations, heat, weight, state,
):  # fmt: skip
    """Search for better sequences, starting from the given ones. Replaces codes, length and host by those of the best
    plan found.

    free (n,)      whether the node may change its worker
    mixed (w,)     whether the worker may split B and join I and W
    lag (w,)       added to the end of the worker's stage to give the worker's value (`energy`)
    target         the search ends once the value is at most this
    starts, order  work space
    iterations     maximum number of steps
    heat           initial temperature in ticks. It falls to a fiftieth of this by the last iteration
    weight         weight of the total lateness in the energy
    state (1,)     state of the random number generator

    Returns (value, number of steps)."""
    n, workers = len(host), len(first)
    ends = np.zeros(stages, dtype=np.int64)
    placed = earliest(stages, host, todo, sent, duration, release, travel, first, length, codes, starts, order)
    value, late = energy(stages, host, duration, first, length, codes, starts, lag, target, ends)
    best_value, best_codes, best_host, best_length = value, codes.copy(), host.copy(), length.copy()
    by_stage = np.zeros((stages, workers), dtype=np.int64)  # live workers with room for a micro-batch
    peers = np.zeros(stages, dtype=np.int64)
    for w in range(workers):
        if lag[w] > -(1 << 60) and cap[w] >= 1:
            by_stage[w % stages, peers[w % stages]] = w
            peers[w % stages] += 1
    critical = np.empty(len(codes), dtype=np.int64)
    n_critical = 0
    late_starts = np.empty(len(codes), dtype=np.int64)
    deadline = np.zeros(workers, dtype=np.int64)
    new_starts, new_order = np.empty_like(starts), np.empty_like(order)
    old_codes, old_host, old_length = codes.copy(), host.copy(), length.copy()
    at_u, at_v = np.empty(4, dtype=np.int64), np.empty(4, dtype=np.int64)
    fresh = True
    cooling = math.exp(math.log(0.02) / max(iterations, 1))
    step = 0
    while step < iterations and best_value > target:
        step += 1
        heat *= cooling
        if fresh:
            level = value
            if draw(state, 4) == 0:
                level = target + (value - target) * draw(state, 8) // 8
            for w in range(workers):
                deadline[w] = level - lag[w]
            latest(stages, host, todo, sent, duration, travel, codes, order, placed, deadline, late_starts)
            n_critical = 0
            for i in range(placed):
                if late_starts[order[i]] <= starts[order[i]]:
                    critical[n_critical] = order[i]
                    n_critical += 1
            fresh = False
        if n_critical == 0:
            fresh = True
            continue
        i = critical[draw(state, n_critical)]
        v = codes[i] >> 2
        w, s = host[v], v % stages
        begin, end = first[w], first[w] + length[w]
        other = w
        what = draw(state, 16)
        done = False
        if what < 10:  # move within the sequence, mostly to an earlier position
            far = 1 + (draw(state, 6) if draw(state, 3) == 0 else 0)
            j = max(i - far, begin) if draw(state, 4) else min(i + far, end - 1)
            if i != j:
                done = move(codes, i, j)
                if done and not fits(codes, begin, end, held[w], cap[w], i_release):
                    move(codes, j, i)
                    done = False
        elif what < 13 or not (free[v] or mixed[w]):  # swap two micro-batches of the stage
            u = draw(state, n // stages) * stages + s
            if u != v and todo[u] and (host[u] == w or (free[u] and free[v])):
                other = host[u]
                done = exchange(codes, first, length, host, u, v, at_u, at_v)
        elif mixed[w] and (what == 13 or not free[v]):
            if codes[i] & 3 == B or (codes[i] & 3 == I and todo[v] & NEED_G):
                refit(codes, first, length, w, i)
                done = fits(codes, begin, first[w] + length[w], held[w], cap[w], i_release)
                if not done:
                    codes[begin : end + 1] = old_codes[begin : end + 1]
                    length[w] = old_length[w]
        elif free[v] and peers[s] > 1:
            other = by_stage[s, draw(state, peers[s])]
            if other != w:
                new_starts[:] = starts
                give(codes, first, length, host, new_starts, v, other, at_u)
                done = fits(codes, first[other], first[other] + length[other], held[other], cap[other], i_release)
                if not done:
                    for x in (w, other):
                        codes[first[x] : first[x] + old_length[x]] = old_codes[first[x] : first[x] + old_length[x]]
                        length[x] = old_length[x]
                    host[v] = w
        if not done:
            continue
        placed_new = earliest(
            stages,
            host,
            todo,
            sent,
            duration,
            release,
            travel,
            first,
            length,
            codes,
            new_starts,
            new_order,
        )
        take = placed_new == length.sum()
        if take:
            new_value, new_late = energy(stages, host, duration, first, length, codes, new_starts, lag, target, ends)
            worse = float(new_value - value) + weight * (new_late - late)
            take = worse <= 0 or math.exp(-worse / heat) * 65536.0 > draw(state, 65536)
        if take:
            value, late, placed = new_value, new_late, placed_new
            starts, new_starts = new_starts, starts
            order, new_order = new_order, order
            for x in (w, other):
                old_codes[first[x] : first[x] + length[x]] = codes[first[x] : first[x] + length[x]]
                old_length[x] = length[x]
            old_host[:] = host
            fresh = True
            if value < best_value:
                best_value = value
                best_codes[:] = codes
                best_host[:] = host
                best_length[:] = length
        else:
            for x in (w, other):
                codes[first[x] : first[x] + old_length[x]] = old_codes[first[x] : first[x] + old_length[x]]
                length[x] = old_length[x]
            host[:] = old_host
    codes[:], host[:], length[:] = best_codes, best_host, best_length
    return best_value, step
