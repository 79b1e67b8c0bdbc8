"""The validator agrees with the judge on valid and on corrupted plans."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_problems import problems, relaxed, remainders
from recycle_schedules import Problem, plan
from recycle_schedules.validate import validate


def verdict(judge, schedule):
    data = schedule.to_json()
    return judge.validate(data["problem"], data["ops"])


@relaxed
@given(st.data())
def test_any_problem_gets_a_plan_that_both_accept(judge, data):
    schedule = plan(data.draw(problems()))
    result = verdict(judge, schedule)
    assert result["errors"] == []
    assert validate(schedule) == []
    metrics = result["metrics"]
    if metrics:
        assert schedule.makespan == pytest.approx(metrics["makespan"], abs=1e-6)
        assert schedule.period is None or schedule.period == pytest.approx(metrics["period"], abs=1e-6)
    assert schedule.value >= schedule.lower_bound - 1e-6


@relaxed
@given(st.data())
def test_any_remainder_gets_a_plan_that_both_accept(judge, data):
    left, _ = data.draw(remainders(plan(data.draw(problems()))))
    schedule = plan(left)
    assert verdict(judge, schedule)["errors"] == []
    assert validate(schedule) == []
    assert schedule.value >= schedule.lower_bound - 1e-6


@settings(relaxed, max_examples=120)
@given(st.data())
def test_both_reject_the_same_plans(judge, data):
    problem = data.draw(problems(most_microbatches=3))
    schedule = plan(problem)
    if data.draw(st.booleans()):
        schedule = plan(data.draw(remainders(schedule))[0])
    arrays = schedule.arrays
    if not len(arrays):
        return
    k = data.draw(st.integers(0, len(arrays) - 1))
    damage = data.draw(st.sampled_from(["early", "late", "long", "move", "drop", "kind", "twice"]))
    columns = {name: getattr(arrays, name).copy() for name in arrays.__dataclass_fields__}
    if damage in ("early", "late"):
        shift = data.draw(st.sampled_from([0.3, 1.0])) * (-1 if damage == "early" else 1)
        columns["start"][k] += shift
        columns["end"][k] += shift
    elif damage == "long":
        columns["end"][k] += 0.25
    elif damage == "move":
        columns["pipeline"][k] = data.draw(st.integers(0, problem.pipelines - 1))
    elif damage == "kind" and columns["kind"][k] != 4:
        columns["kind"][k] = data.draw(st.integers(0, 3))
    damaged = replace(schedule, arrays=type(arrays)(**columns))
    if damage in ("drop", "twice"):
        index = [i for i in range(len(arrays)) if damage == "twice" or i != k] + ([k] if damage == "twice" else [])
        damaged = replace(schedule, arrays=arrays.take(index))
    assert (verdict(judge, damaged)["errors"] == []) == (validate(damaged) == [])


def test_errors_name_the_op_and_the_rule():
    schedule = plan(Problem(pipelines=2, stages=2, microbatches=1))
    moved = replace(schedule, arrays=replace(schedule.arrays, start=schedule.arrays.start * 0))
    assert any("lasts" in error and "worker 0.1" in error for error in validate(moved))
