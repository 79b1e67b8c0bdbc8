"""Simulates a table of list-scheduling policies and keeps the best schedule.

    values, peaks, best, ends, codes, starts = try_policies(...)

Written for numba, also runs as plain Python.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from .list_schedule import simulate
from .timing import NEVER, latest, stage_times

COLUMNS = ("host", "key_f", "key_g", "g_first", "window", "patience", "rush", "fuse")
"""Columns of a policy table. host, key_f, key_g, window and fuse are row indices into hosts, keys, windows and fuses.
g_first is a flag. patience and rush are numbers."""

FAR = 1 << 60


@register_jitable
def stage_value(stages, host, duration, codes, starts, lag, from_first):
    """Returns (value, ends). ends (P,): end of each stage's last gradient.

    value: the maximum over all workers w of ends[w's stage] + lag[w]. If `from_first`, w's first start is
    subtracted."""
    ends, first = stage_times(stages, host, duration, codes, starts)
    value = 0
    for w in range(len(lag)):
        if first[w] < NEVER:
            value = max(value, ends[w % stages] + lag[w] - (first[w] if from_first else 0))
    return value, ends


@register_jitable
def shift_late(stages, host, todo, sent, duration, travel, codes, starts, ends, workers):
    """Delay every op as far as possible without changing the ends of the stages. This shortens the period of a repeated
    step."""
    deadline = np.empty(workers, dtype=np.int64)
    for w in range(workers):
        deadline[w] = ends[w % stages]
    order = np.arange(len(codes))
    latest(stages, host, todo, sent, duration, travel, codes, order, len(codes), deadline, starts)


def try_policies(
    stages, hosts, keys, windows, fuses, table, todo, sent, duration, cap, held, release, travel,
    i_release, lag, steady, target,
):  # fmt: skip
    """Simulate the rows of a policy table until one reaches the target.

    hosts (h, n), keys (k, n), windows (x, w), fuses (f, w)   the tables whose rows the columns of `table` select
    lag (w,)   added to the end of a stage's gradients to give the worker's value (`stage_value`)
    steady     whether a worker's value counts from the worker's first start
    target     value in ticks that ends the loop

    Returns (values, peaks, best, ends, codes, starts):
    values (rows,)    value of each row, FAR if not tried
    peaks (rows, w)   peak number of micro-batches in flight on each worker
    best              index of the best row
    ends (P,)         end of each stage's last gradient in the schedule of the best row
    codes, starts     schedule of the best row"""
    rows, workers = len(table), len(cap)
    values = np.full(rows, FAR, dtype=np.int64)
    peaks = np.zeros((rows, workers))
    best, best_value, best_ends = 0, FAR, np.zeros(stages, dtype=np.int64)
    best_codes, best_starts = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    for r in range(rows):
        row = table[r]
        host = hosts[row[0]]
        codes, starts, peaks[r] = simulate(
            stages, host, todo, sent, duration, cap, held, release, travel, i_release,
            keys[row[1]], keys[row[2]], row[3] != 0, windows[row[4]], row[5], row[6], fuses[row[7]],
        )  # fmt: skip
        value, ends = stage_value(stages, host, duration, codes, starts, lag, steady)
        if steady:
            shift_late(stages, host, todo, sent, duration, travel, codes, starts, ends, workers)
            value, ends = stage_value(stages, host, duration, codes, starts, lag, steady)
        values[r] = value
        if value < best_value:
            best, best_value, best_ends, best_codes, best_starts = r, value, ends, codes, starts
            if value <= target:
                break
    return values, peaks, best, best_ends, best_codes, best_starts
