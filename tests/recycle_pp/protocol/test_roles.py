"""A stage without a worker is filled from the stage that has the most."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recycle_schedules import Worker

from recycle_pp.protocol.roles import fill_stages


def grid(pipelines, stages):
    return {d * stages + s: Worker(d, s) for d in range(pipelines) for s in range(stages)}


def test_a_worker_of_the_richest_stage_moves_into_the_empty_one():
    roles = fill_stages(grid(2, 2), present={0, 2, 3} - {3}, stages=2)  # stage 1 is lost; 0.0 and 1.0 are left
    assert sorted(roles[r].stage for r in (0, 2)) == [0, 1]


def test_too_few_workers_are_rejected():
    with pytest.raises(ValueError, match="live workers: 1, fewer than the 2 stages"):
        fill_stages(grid(2, 2), present={0}, stages=2)


@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_every_stage_is_filled_and_every_rank_has_its_own_role(pipelines, stages, data):
    roles = grid(pipelines, stages)
    present = data.draw(st.sets(st.sampled_from(sorted(roles)), min_size=min(stages, len(roles))))
    new = fill_stages(roles, present, stages)
    assert {new[r].stage for r in present} == set(range(stages))
    assert sorted(new.values()) == sorted(roles.values())
    if {roles[r].stage for r in present} == set(range(stages)):
        assert new == roles
