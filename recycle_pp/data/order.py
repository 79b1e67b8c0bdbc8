"""The order of samples. The window of a sample is computed from the sample's number alone, in microseconds.

    order = Order([1000], None, seed=0)              # each epoch is a permutation of all windows
    order = Order([1000, 50], [0.8, 0.2], seed=0)    # 4 of 5 samples come from the first source
    order.window(n)                                  # windows of all sources are numbered consecutively
    order = Order([1000], None, seed=0, part=(1, 8))     # only every eighth sample of the first epoch, in all epochs
    interleaved([1000, 50], [0.8, 0.2])[:100]        # the windows of a validation with 100 samples

Without weights every window of every source occurs once per epoch. With weights each source has its own epochs. The
sources alternate in a fixed pattern of `PATTERN` turns, so any range of samples contains each source's share, rounded
to 1 / PATTERN.

With parts (for islands), each part has the same windows in all epochs, and no window is in two parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from .permutation import permuted

PATTERN = 4096


class Order:
    """The order of the samples of one or more sources.

    counts   number of windows of each source
    weights  relative number of samples from each source, positive; None: in proportion to the windows
    part     (number of the part, number of parts)

    Raises:
        ValueError: a weight is too small for one turn in the pattern, or a part has no windows.
    """

    def __init__(
        self, counts: Sequence[int], weights: Sequence[float] | None, seed: int, part: tuple[int, int] = (0, 1)
    ):
        self._counts, self._seed, self._part = list(counts), seed, part
        whole = [sum(counts)] if weights is None else counts
        if min(whole) < part[1]:
            raise ValueError(
                f"islands.parts={part[1]}, but there are only {min(whole)} training samples"
                + ("" if weights is None else " in the smallest source")
            )
        self._starts = [0, *accumulate(counts)]
        self._turns = None if weights is None or len(counts) == 1 else _turns(weights)

    def window(self, n: int) -> int:
        """The window of sample n of the run, for any n >= 0."""
        if self._turns is None:
            return self._picked(n, self._starts[-1])
        source, before, each = self._turns[n % PATTERN]
        return self._starts[source] + self._picked(n // PATTERN * each + before, self._counts[source], source)

    def _picked(self, n: int, count: int, *source: int) -> int:
        """Window n of a shuffle of `count` windows. source: its number, if each source has its own epochs"""
        part, parts = self._part
        mine = len(range(part, count, parts))
        epoch, i = divmod(n, mine)
        if parts == 1:
            return permuted(i, count, (self._seed, epoch, *source))
        if epoch:  # a different order of the same windows
            i = permuted(i, mine, (self._seed, epoch, part, *source))
        return permuted(part + parts * i, count, (self._seed, 0, *source))


def interleaved(counts: Sequence[int], weights: Sequence[float] | None) -> np.ndarray:
    """All windows once, as numbers from 0 to sum(counts) - 1. The windows of each source are in order and evenly
    spread, so the first n windows contain each source's share, while it lasts. Windows of a single source keep their
    order.

    counts, weights: see `Order`
    """
    shares = np.asarray(counts if weights is None else weights, dtype=np.float64)
    return np.argsort(np.concatenate([(np.arange(n) + 0.5) / s for n, s in zip(counts, shares, strict=True)]),
                      kind="stable")  # fmt: skip


def _turns(weights: Sequence[float]) -> list[tuple[int, int, int]]:
    """For every turn of the pattern: (source, number of the source's earlier turns, number of all its turns).

    The turns of each source are evenly spread.
    """
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
