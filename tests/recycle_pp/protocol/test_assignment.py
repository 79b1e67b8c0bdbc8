"""A stage without a live worker gets one from the stage with the most workers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recycle_schedules import Worker

from recycle_pp.protocol.assignment import completed, exchanged, initial, refilled, spawned


def test_a_worker_of_the_richest_stage_moves_into_the_empty_one():
    assignment = refilled(initial(2, 2), present={0, 2, 3} - {3}, stages=2)  # stage 1 is lost; 0.0 and 1.0 are left
    assert sorted(assignment[m].stage for m in (0, 2)) == [0, 1]


def test_too_few_workers_are_rejected():
    with pytest.raises(ValueError, match="live workers: 1, fewer than the 2 stages"):
        refilled(initial(2, 2), present={0}, stages=2)


@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_every_stage_is_filled_and_every_member_plays_its_own_worker(pipelines, stages, data):
    before = initial(pipelines, stages)
    present = data.draw(st.sets(st.sampled_from(sorted(before)), min_size=min(stages, len(before))))
    new = refilled(before, present, stages)
    assert {new[m].stage for m in present} == set(range(stages))
    assert sorted(new.values()) == sorted(before.values())
    if {before[m].stage for m in present} == set(range(stages)):
        assert new == before


def test_an_understudy_and_the_dead_member_exchange_their_roles():
    before = initial(2, 2)
    after = exchanged(before, 2, Worker(1, 1))
    assert after == before | {2: Worker(1, 1), 3: Worker(1, 0)}


def test_an_outdated_assignment_is_completed_without_giving_a_role_twice():
    """Member 3 died, returned in the old role of its understudy 2, and then the coordinator was lost."""
    outdated = initial(2, 2) | {3: Worker(1, 0)}
    found = completed({0: Worker(0, 0), 2: Worker(1, 1)}, outdated, initial(2, 2).values())
    assert found == {0: Worker(0, 0), 1: Worker(0, 1), 2: Worker(1, 1), 3: Worker(1, 0)}


def test_of_two_members_started_as_the_same_worker_the_live_one_keeps_the_role():
    """Members 1 and 3 died. The job restarted with member 2 in stage 1, and then the coordinator was lost."""
    orders = initial(2, 2) | {2: Worker(1, 1)}
    found = spawned(orders, {0, 2}, pipelines=2, stages=2)
    assert found == {0: Worker(0, 0), 1: Worker(0, 1), 2: Worker(1, 1), 3: Worker(1, 0)}
    assert spawned({}, {}, pipelines=2, stages=2) == initial(2, 2)
