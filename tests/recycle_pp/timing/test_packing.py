"""Packing and unpacking keeps every bit of spans."""

from hypothesis import given
from hypothesis import strategies as st

from recycle_pp.timing.packing import KINDS, OWN, listed, pack, unpack

numbers, seconds = st.integers(0, 1 << 30), st.floats(0, 1e9)
spans = st.lists(st.tuples(st.sampled_from(KINDS), numbers, numbers, seconds, seconds, seconds).map(list))


@given(spans)
def test_spans_are_unchanged_by_packing_and_unpacking(sent):
    assert listed(unpack(pack(sent))) == [span[:5] for span in sent]
    assert unpack(pack(sent))[:, OWN].tolist() == [span[5] for span in sent]


@given(spans, seconds)
def test_another_clock_changes_only_times(sent, later):
    assert listed(unpack(pack(sent), later)) == [
        [k, d, i, start + later, end + later] for k, d, i, start, end, _ in sent
    ]
