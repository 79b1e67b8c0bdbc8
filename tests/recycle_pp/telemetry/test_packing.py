"""Spans survive the journey, to the last bit."""

from hypothesis import given
from hypothesis import strategies as st

from recycle_pp.telemetry.packing import KINDS, listed, pack, unpack

numbers, seconds = st.integers(0, 1 << 30), st.floats(0, 1e9)
spans = st.lists(st.tuples(st.sampled_from(KINDS), numbers, numbers, seconds, seconds).map(list))


@given(spans)
def test_spans_arrive_as_they_were_sent(sent):
    assert listed(unpack(pack(sent))) == sent


@given(spans, seconds)
def test_another_clock_moves_times_alone(sent, later):
    assert listed(unpack(pack(sent), later)) == [[k, d, i, start + later, end + later] for k, d, i, start, end in sent]
