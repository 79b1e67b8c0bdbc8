"""Marks the tokens of conversations, and packs whole conversations into samples of T tokens.

    marked = mark(ids, counted)                     # uint32: token | TARGET | BEGINS
    packed([5, 3, 9], 10)                           # [[0, 1], [2]]: numbers of each sample's conversations
    rows_of([marked, other], 1024)                  # (n, 1024) marked tokens

A token with the mark TARGET has a loss. It is predicted from the earlier tokens of its conversation, so the first token
is never a target. BEGINS marks the first token of a conversation. Zeros fill the rest of a sample and count as one more
conversation.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

TARGET, BEGINS = 1 << 31, 1 << 30
TOKEN = BEGINS - 1
DTYPE = np.dtype("<u4")


def mark(ids: np.ndarray, counted: np.ndarray) -> np.ndarray:
    """The marked tokens of a conversation, (n,) uint32.

    ids      (n,) tokens
    counted  (n,) bool, whether the assistant wrote the token
    """
    marked = ids.astype(DTYPE) | np.where(counted, DTYPE.type(TARGET), DTYPE.type(0))
    marked[:1] = ids[:1] | BEGINS
    return marked


def targets_in(marked: np.ndarray) -> int:
    return int(np.count_nonzero(marked & TARGET))


def rows_of(conversations: Sequence[np.ndarray], T: int) -> np.ndarray:
    """The samples that contain all conversations: (n, T) marked tokens. conversations: 1 to T marked tokens each."""
    groups = packed([len(one) for one in conversations], T)
    rows = np.zeros((len(groups), T), DTYPE)
    for row, group in zip(rows, groups, strict=True):
        tokens = np.concatenate([conversations[i] for i in group])
        row[: len(tokens)] = tokens
        if len(tokens) < T:
            row[len(tokens)] = BEGINS
    return rows


def packed(lengths: Sequence[int], T: int) -> list[list[int]]:
    """For each sample, the numbers of its conversations. Packs by best fit, the longest conversation first.

    Conversations in a sample are sorted by number, and samples by their first conversation. Without this, the last
    samples would contain mostly short conversations, which are packed last.
    """
    groups: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (free tokens, sample), ascending
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = bisect_left(free, (lengths[i], 0))
        if at == len(free):
            groups.append([])
            insort(free, (T, len(groups) - 1))
        room, group = free.pop(at)
        groups[group].append(i)
        insort(free, (room - lengths[i], group))
    return sorted(sorted(group) for group in groups)
