"""The order of samples. The window of any sample is computed from its number, in microseconds and without history.

    order = Order([1000], None, seed=0)              # each epoch is a permutation of all windows
    order = Order([1000, 50], [0.8, 0.2], seed=0)    # 4 of 5 samples come from the first source
    order.window(n)                                  # windows of all sources are numbered consecutively

Without weights every window of every source occurs once per epoch. With weights each source has its own epochs. The
sources alternate in a fixed pattern of `PATTERN` turns, so any range of samples contains each source's share, rounded
to 1 / PATTERN.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from .permutation import permuted

PATTERN = 4096


class Order:
    """The order of the samples of one or more sources.

    counts: number of windows of each source. weights: relative number of samples of each source, positive; or None.

    Raises:
        ValueError: a weight is too small for one turn in the pattern.
    """

    def __init__(self, counts: Sequence[int], weights: Sequence[float] | None, seed: int):
        self._counts, self._seed = list(counts), seed
        self._starts = [0, *accumulate(counts)]
        self._turns = None if weights is None or len(counts) == 1 else _turns(weights)

    def window(self, n: int) -> int:
        """The window of sample n of the run, for any n >= 0."""
        if self._turns is None:
            total = self._starts[-1]
            return permuted(n % total, total, (self._seed, n // total))
        source, before, each = self._turns[n % PATTERN]
        epoch, i = divmod(n // PATTERN * each + before, self._counts[source])
        return self._starts[source] + permuted(i, self._counts[source], (self._seed, epoch, source))


def _turns(weights: Sequence[float]) -> list[tuple[int, int, int]]:
    """For every turn of the pattern: (source, number of the source's earlier turns, number of all its turns). The turns
    of each source are evenly spread."""
    shares = np.asarray(weights, dtype=np.float64) / sum(weights) * PATTERN
    each = np.floor(shares).astype(int)
    for source in np.argsort(each - shares, kind="stable")[: PATTERN - int(each.sum())]:
        each[source] += 1
    if each.min() < 1:
        raise ValueError(
            f"data.weights: {weights[int(each.argmin())]} is less than 1/{PATTERN} of the sum, too small to be used"
        )
    turns = sorted(((i + 0.5) / count, source, i) for source, count in enumerate(map(int, each)) for i in range(count))
    return [(source, i, int(each[source])) for _, source, i in turns]
