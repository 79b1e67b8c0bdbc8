"""Conversations are packed whole, roughly in their original order, and with little padding."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from recycle_pp.data.chat.packing import BEGINS, TARGET, TOKEN, mark, packed, rows_of, targets_in

T = 32
lengths = st.lists(st.integers(1, T), min_size=1, max_size=200)


@given(lengths)
def test_each_conversation_is_in_one_sample_that_has_room_for_it(lengths):
    groups = packed(lengths, T)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in group) <= T for group in groups)
    assert groups == sorted(groups) and all(group == sorted(group) for group in groups)
    assert len(groups) <= 2 * -(-sum(lengths) // T), "two samples that are half empty would have been merged"


def test_short_conversations_leave_little_padding():
    lengths = np.random.default_rng(0).integers(1, T // 2, 4096).tolist()
    assert sum(lengths) > 0.99 * T * len(packed(lengths, T))


@given(lengths, st.integers(0, 1 << 30))
def test_the_bits_of_tokens_mark_the_beginnings_of_conversations_and_the_targets(lengths, seed):
    random = np.random.default_rng(seed)
    conversations = [(random.integers(1, 1 << 20, n).astype(np.uint32), random.random(n) < 0.5) for n in lengths]
    rows = rows_of([mark(*one) for one in conversations], T)
    assert rows.shape[1] == T and rows.dtype == np.dtype("<u4")
    found = []
    for row in rows:
        begins = [*np.flatnonzero(row & BEGINS), T]
        assert begins[0] == 0
        found += [row[begin:end] for begin, end in pairwise(begins)]
    whole = sorted(((one & TOKEN).tolist(), (one & TARGET > 0).tolist()) for one in found if one[0] & TOKEN)
    assert whole == sorted((ids.tolist(), [False, *counted[1:].tolist()]) for ids, counted in conversations)
    assert not any((one & ~np.uint32(BEGINS)).any() for one in found if not one[0] & TOKEN), "the rest is zeros"
    assert targets_in(rows) == sum(int(counted[1:].sum()) for _, counted in conversations)
