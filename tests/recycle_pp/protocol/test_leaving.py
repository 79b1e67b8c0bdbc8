"""Who may leave with a commit."""

from itertools import chain, combinations

from hypothesis import given
from hypothesis import strategies as st
from recycle_schedules import Worker

from recycle_pp.protocol.leaving import leavers

LIVE = [Worker(d, s) for d in range(3) for s in range(2)]
some_of_them = st.sets(st.sampled_from(LIVE))


@given(some_of_them, st.sets(st.sampled_from(LIVE), min_size=1), st.integers(0, 3))
def test_a_peer_stays_and_of_sharded_state_one_of_a_stage_goes_at_a_time(leaving, live, copies):
    gone = leavers(leaving, live, copies)
    assert gone <= leaving & live
    for stage in range(2):
        of = {w for w in gone if w.stage == stage}
        assert not of or any(w.stage == stage for w in live - leaving), "somebody stays who need not go"
        assert not copies or len(of) <= 1
    if copies == 1:
        assert not gone, "a block lies nowhere else"


def test_unsharded_all_go_at_once_and_sharded_all_in_turn():
    for leaving in chain.from_iterable(combinations(LIVE, n) for n in range(4)):
        stay = {w.stage for w in LIVE if w not in leaving}
        free = {w for w in leaving if w.stage in stay}
        assert leavers(leaving, LIVE) == free
        left, live = set(leaving), set(LIVE)
        while gone := leavers(left, live, copies=2):
            left, live = left - gone, live - gone
        assert left == set(leaving) - free
