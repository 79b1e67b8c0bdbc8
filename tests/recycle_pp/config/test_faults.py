"""Injected faults on a command line."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recycle_schedules import Worker

from recycle_pp.config.faults import MOMENTS, Fault, faults
from recycle_pp.config.loading import load


def asked(**keys):
    return faults(load({"parallel": {"pipelines": 3, "stages": 4}, "run": {"steps": 60}, **keys}))


def test_faults_are_sorted_by_step():
    assert asked(fail_at="20:1.2") == [Fault("kill", 20, Worker(1, 2), "forward", 1.0)]
    assert asked(
        fail_at=["31:0.1@allreduce", "20:1.2@backward"], hang_at="7:2.3@vote", slow_at="3:0.0@2.5", rejoin_at="40:1.2"
    ) == [
        Fault("slow", 3, Worker(0, 0), "forward", 2.5),
        Fault("hang", 7, Worker(2, 3), "vote", 1.0),
        Fault("kill", 20, Worker(1, 2), "backward", 1.0),
        Fault("kill", 31, Worker(0, 1), "allreduce", 1.0),
        Fault("rejoin", 40, Worker(1, 2), "forward", 1.0),
    ]


@given(st.integers(0, 59), st.integers(0, 2), st.integers(0, 3), st.sampled_from(MOMENTS))
def test_every_worker_can_be_killed_at_every_moment_of_every_step(step, pipeline, stage, moment):
    assert asked(fail_at=f"{step}:{pipeline}.{stage}@{moment}") == [
        Fault("kill", step, Worker(pipeline, stage), moment, 1.0)
    ]


@given(st.text(max_size=20))
def test_any_other_text_raises_a_value_error(text):
    try:
        found = asked(fail_at=text)
    except ValueError as error:
        assert str(error).startswith("fail_at")
    else:
        assert len(found) == 1


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"rejoin_at": "40:1.2"}, "needs an earlier fail_at or hang_at of worker 1.2"),
        ({"rejoin_at": "20:1.2", "fail_at": "20:1.2"}, "needs an earlier fail_at"),
        ({"rejoin_at": "40:1.2", "fail_at": "20:1.1"}, "needs an earlier fail_at"),
        ({"rejoin_at": "40:1.2@vote", "fail_at": "20:1.2"}, "rejoin_at must be STEP:D.S, for instance 20:1.2"),
        ({"slow_at": "20:1.2"}, "slow_at must be STEP:D.S@FACTOR, for instance 20:1.2@2.5"),
        ({"slow_at": "20:1.2@0.5"}, "must be a number of at least 1"),
        ({"slow_at": "20:1.2@nan"}, "must be a number of at least 1"),
    ],
)
def test_impossible_faults_are_named(keys, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        asked(**keys)
