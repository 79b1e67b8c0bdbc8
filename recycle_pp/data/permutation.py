"""A keyed pseudo-random permutation of range(n), computed without a table.

permuted(i, n, (seed, epoch))     # a different number of range(n) for every i of range(n); takes microseconds
"""

from __future__ import annotations

import functools
import hashlib

ROUNDS = 4  # rounds of the Feistel network: four give a pseudo-random permutation (Luby and Rackoff 1988)
MASK = (1 << 64) - 1


def permuted(i: int, n: int, key: tuple[int, ...]) -> int:
    """The image of i under a permutation of range(n) keyed by `key`.

    Applies a Feistel network repeatedly until the result is below n.
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    keys = _round_keys(key)
    while True:
        left, right = i >> half, i & low
        for round_key in keys:
            left, right = right, left ^ (_mixed(right ^ round_key) & low)
        i = left << half | right
        if i < n:
            return i


@functools.lru_cache(maxsize=256)  # enough, because an epoch has one key per source, and epochs follow in order
def _round_keys(key: tuple[int, ...]) -> list[int]:
    digest = hashlib.sha256(repr(key).encode()).digest()
    return [int.from_bytes(digest[8 * r : 8 * r + 8], "little") for r in range(ROUNDS)]


def _mixed(x: int) -> int:
    """The finaliser of splitmix64 (Steele et al. 2014): every output bit depends on every input bit."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31
