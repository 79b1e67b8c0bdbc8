"""Re-routing of micro-batches as a minimum-cost flow."""

from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from recycle_schedules.planner.shares import cheapest_flow


def flow(count, message, load, cost):
    return cheapest_flow(*(np.array(a, dtype=np.int64) for a in (count, message, load, cost))).tolist()


def price(taken, message, load, cost):
    """The cost of a flow: the sum of all message times and of the end times of all additional micro-batches."""
    ways = sum(n * m for row, ways in zip(taken, message, strict=True) for n, m in zip(row, ways, strict=True))
    totals = [sum(column) for column in zip(*taken, strict=True)]
    return ways + sum(
        begin + k * each for n, begin, each in zip(totals, load, cost, strict=True) for k in range(1, n + 1)
    )


def test_equally_near_peers_share_evenly():
    assert flow([6], [[0, 0, 0]], [0, 0, 0], [3, 3, 3]) == [[2, 2, 2]]


def test_busy_or_slow_peers_take_fewer_micro_batches():
    assert flow([4], [[0, 0]], [6, 0], [3, 3]) == [[1, 3]]
    assert flow([3], [[0, 0]], [0, 0], [6, 3]) == [[1, 2]]


def test_a_nearer_peer_takes_more_if_the_message_times_differ_enough():
    assert flow([6], [[0, 1]], [0, 0], [3, 3]) == [[3, 3]]
    assert flow([6], [[0, 7]], [0, 0], [3, 3]) == [[4, 2]]
    assert flow([6], [[0, 100]], [0, 0], [3, 3]) == [[6, 0]]


def test_the_micro_batches_of_two_dead_workers_each_stay_on_their_host():
    """A greedy choice could use up the only peer near the second dead worker for the first one."""
    assert flow([2, 2], [[0, 4], [4, 0]], [0, 0], [3, 3]) == [[2, 0], [0, 2]]
    assert flow([2, 2], [[0, 1], [0, 9]], [0, 0], [3, 3]) == [[0, 2], [2, 0]]


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_no_other_assignment_costs_less(data):
    groups, peers = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    row = st.lists(st.integers(0, 9), min_size=peers, max_size=peers)
    count = data.draw(st.lists(st.integers(1, 3), min_size=groups, max_size=groups))
    message = data.draw(st.lists(row, min_size=groups, max_size=groups))
    load, cost = data.draw(row), data.draw(row)
    taken = flow(count, message, load, cost)
    assert [sum(row) for row in taken] == count
    shares = [[s for s in product(range(n + 1), repeat=peers) if sum(s) == n] for n in count]
    assert price(taken, message, load, cost) == min(price(s, message, load, cost) for s in product(*shares))
