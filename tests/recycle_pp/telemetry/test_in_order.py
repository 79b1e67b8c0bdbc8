"""Calls run in order even if some become ready late, so a cause is written before its effects."""

from hypothesis import given
from hypothesis import strategies as st

from recycle_pp.telemetry.in_order import InOrder


@given(st.lists(st.sampled_from(["call", "reserve", "settle"])), st.randoms(use_true_random=False))
def test_calls_run_in_order_as_soon_as_all_earlier_ones_are_ready(moves, chance):
    order, ran, places, taken = InOrder(), [], {}, 0
    for move in moves:
        if move == "call":
            order(ran.append, taken)
        elif move == "reserve":
            places[taken] = order.reserve(ran.append, taken)
        elif places:
            order.settle(places.pop(chance.choice(sorted(places))))
        taken += move != "settle"
        assert ran == list(range(min(places, default=taken)))
    order.release()
    assert ran == list(range(taken))


def test_a_call_that_fails_does_not_drop_later_ones():
    order, ran = InOrder(), []

    def fail():
        raise OSError

    place = order.reserve(fail)
    order(ran.append, "later")
    for _ in range(2):
        try:
            order.settle(place)
        except OSError:
            assert ran == []
    assert ran == ["later"]
