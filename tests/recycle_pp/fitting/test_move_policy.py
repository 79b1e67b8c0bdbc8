"""When layers move after a death, and how long an outage is expected to last."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recycle_schedules import Worker

from recycle_pp.fitting import move_policy
from recycle_pp.fitting.move_policy import LEAST, MARGIN, START, Move, Outages

SECONDS = st.floats(1e-3, 1e5)
MOVES = st.builds(
    Move, now=SECONDS, then=SECONDS, outage=SECONDS, seconds=SECONDS, back=st.booleans(), switch=st.floats(0, 100)
)


@given(MOVES)
def test_no_setting_moves_layers_if_the_new_step_is_not_shorter(move):
    longer = replace(move, then=max(move.now, move.then))
    assert not any(longer.pays(mode) for mode in ("auto", "always", "never"))


@given(MOVES)
def test_never_does_not_move_and_always_moves_whenever_auto_does(move):
    assert not move.pays("never")
    assert move.pays("always") or not move.pays("auto")


@given(MOVES)
def test_always_moves_for_the_smallest_gain_and_at_any_cost(move):
    dear = replace(move, then=0.999 * move.now, outage=0.0, switch=1e9)
    assert dear.pays("always") and not dear.pays("auto")


@given(MOVES, st.floats(1, 100))
def test_a_move_that_pays_still_pays_if_the_outage_is_longer_or_the_move_cheaper(move, factor):
    if move.pays("auto"):
        for better in (
            replace(move, outage=move.outage * factor),
            replace(move, seconds=move.seconds / factor),
            replace(move, switch=move.switch / factor),
            replace(move, then=move.then / factor),
            replace(move, back=False),
        ):
            assert better.pays("auto")


def test_a_move_pays_if_its_gain_exceeds_its_cost_by_half():
    move = Move(now=1.0, then=0.5, outage=10.0, seconds=0.0, switch=1.0)
    assert (move.gain, move.cost) == (5.0, 1.0)
    border = move.gain / MARGIN
    assert replace(move, switch=0.999 * border).pays("auto")
    assert not replace(move, switch=1.001 * border).pays("auto")


def test_a_move_that_will_be_reversed_costs_twice():
    there = Move(now=1.0, then=0.5, outage=10.0, seconds=4.0, switch=1.0)
    assert replace(there, back=True).cost == 2 * there.cost


def test_auto_ignores_gains_that_are_smaller_than_the_error_of_measured_times():
    move = Move(now=1.0, then=1 - 0.9 * LEAST, outage=1e6, switch=0.0)
    assert not move.pays("auto") and move.pays("always")


A, B = Worker(0, 1), Worker(2, 1)
EVENTS = st.lists(st.tuples(st.floats(0.1, 1e4), st.sets(st.sampled_from([A, B, Worker(1, 0)]))), min_size=1)


def history(*observed, default=900.0):
    outages = Outages(default)
    for now, dead in observed:
        outages.observe(frozenset(dead), now)
    return outages


def test_the_first_outage_is_expected_to_last_as_long_as_schedule_outage():
    assert history((5.0, {A})).expected(7.0) == 900.0


def test_later_outages_are_expected_to_last_as_long_as_those_before():
    outages = history((0, {A}), (10, {}), (20, {A}), (50, {}), (100, {A}))
    assert outages.expected(100) == 20.0, "the mean of 10 and 30"
    assert outages.expected(115) == 15.0, "this outage is already longer than that of 10"
    assert outages.expected(131) == 900.0, "longer than all before"


def test_a_restarting_process_is_expected_soon_at_first_and_later_as_past_outages_suggest():
    outages = history((0, {A}))
    assert outages.expected(0, soon={A}) == START
    outages = history((0, {A}), (4, {}), (10, {A}))
    assert outages.expected(10, soon={A}) == 4.0
    assert outages.expected(15, soon={A}) == START
    assert outages.expected(10 + 4 * START, soon={A}) == 4 * START, "the restart is taking long"


def test_the_first_of_several_workers_is_back_sooner_than_each_of_them():
    assert history((0, {A, B})).expected(0) == 450.0
    assert history((0, {A, B})).expected(0, soon={A}) < START


def test_with_all_workers_alive_the_expected_time_is_that_between_outages():
    assert history((0, {}), (5, {})).expected(5) == math.inf
    assert history((0, {A}), (10, {}), (50, {B}), (60, {})).expected(100) == 50.0


@given(EVENTS)
def test_the_expected_time_is_positive_and_no_worker_is_away_for_longer_than_the_longest_outage(events):
    now, observed = 0.0, []
    for seconds, dead in events:
        now += seconds
        observed.append((now, dead))
    outages = history(*observed, default=900.0)
    assert outages.expected(now) > 0
    if observed[-1][1]:
        assert outages.expected(now) <= max(900.0, now)


@pytest.mark.parametrize(
    "observed",
    [
        [(0, {A}), (10, {}), (50, {B}), (60, {}), (100, {})],
        [(0, {A}), (10, {}), (20, {A}), (50, {}), (100, {A}), (102, {A})],
        [(0, {A}), (40, {}), (50, {A, B}), (55, {A, B})],
        [(7, {})],
    ],
)
def test_a_coordinator_with_another_clock_expects_the_same_times(observed, monkeypatch):
    outages, (now, dead) = history(*observed), observed[-1]
    monkeypatch.setattr(move_policy, "time", lambda: 1e9)
    written = outages.to_json()
    monkeypatch.setattr(move_policy, "time", lambda: 1e9 + 5)  # the other coordinator is elected 5 s later
    other = Outages(900.0)
    other.load(written, now=7000.0)
    other.observe(frozenset(dead), now=7000.0)
    assert other.expected(7001.0, soon={B}) == pytest.approx(outages.expected(now + 6, soon={B}))
