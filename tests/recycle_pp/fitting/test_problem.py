"""The planner's Problem of a job, with the limits by `parallel.memory`."""

from __future__ import annotations

import pytest
from recycle_schedules import Worker, plan
from recycle_schedules.in_flight import peaks

from recycle_pp.config.checks import validate
from recycle_pp.fitting.problem import initial_problem, relaid_problem, with_less_memory
from recycle_pp.model.memory import PROCESS, stage_memory

from ..in_process import small

WIDE = {
    "model__sequence": 256, "parallel__microbatch_size": 4, "parallel__pipelines": 3, "parallel__microbatches": 6,
    "schedule__memory_extra": 4, "run__device": "cpu",
}  # fmt: skip


def room_for(in_flight: float, **changes: object) -> str:
    """The value of `parallel.memory` with room for `in_flight` micro-batches on stage 0 without deaths."""
    of = stage_memory(small(**WIDE, **changes), 0)
    return f"{PROCESS + sum(of.always(3, 6).values()) + of.op + in_flight * of.each()}"


def test_bytes_limit_the_micro_batches_in_addition_to_memory_extra():
    assert initial_problem(small(**WIDE)).limit(Worker(0, 0)) == 6
    assert initial_problem(small(**WIDE, parallel__memory=room_for(3.5))).limit(Worker(0, 0)) == 3
    assert initial_problem(small(**WIDE, parallel__memory=room_for(99))).limit(Worker(0, 0)) == 6


def test_a_death_lowers_the_limit_of_its_peers_and_a_return_raises_it_again():
    problem = initial_problem(small(**WIDE, parallel__memory=room_for(3.02)))
    dead = problem.replace(failed=[(1, 0)])
    assert problem.limit(Worker(0, 0)) == 3 and dead.limit(Worker(0, 0)) == 2
    assert peaks(plan(dead))[Worker(0, 0)] <= 2
    assert dead.replace(failed=[]).limit(Worker(0, 0)) == 3


def test_with_recompute_auto_peers_of_a_dead_worker_recompute_until_it_returns():
    auto = WIDE | {"model__recompute": "auto", "parallel__memory": "1GB"}
    of = stage_memory(small(**auto), 0)
    room = PROCESS + sum(of.always(3, 6).values()) + of.whole_op + 2.02 * of.flight
    problem = initial_problem(small(**auto | {"parallel__memory": f"{room}"})).replace(backward="mixed")
    dead = problem.replace(failed=[(1, 0)])
    assert problem.recomputes == (False, False) and dead.recomputes == (True, False)
    assert dead.limit(Worker(0, 0)) >= 2
    assert {op.kind for op in plan(dead).ops if op.stage == 0} == {"F", "B", "O"}
    assert dead.replace(failed=[]).recomputes == (False, False)


def test_recompute_auto_without_a_memory_limit_is_refused():
    with pytest.raises(ValueError, match=r"^model.recompute=auto needs parallel.memory, on which"):
        validate(small(model__recompute="auto"))
    with pytest.raises(ValueError, match=r"^model.recompute must be one of true, false, auto, not yes"):
        validate(small(model__recompute="yes"))


def test_one_micro_batch_is_always_allowed():
    assert initial_problem(small(**WIDE, parallel__memory="1MB")).limit(Worker(2, 1)) == 1


def test_running_out_of_memory_lowers_the_limit_of_that_worker_and_keeps_the_limits_by_bytes():
    problem = initial_problem(small(**WIDE, parallel__memory=room_for(3.02)))
    less = with_less_memory(with_less_memory(problem, Worker(1, 0), 3), Worker(1, 0), 2)
    assert [less.limit(Worker(d, 0)) for d in range(3)] == [3, 1, 3]
    assert [less.replace(failed=[(2, 0)]).limit(Worker(d, 0)) for d in range(2)] == [2, 1]
    assert with_less_memory(less, Worker(1, 0), 1).limit(Worker(1, 0)) == 1


@pytest.mark.parametrize("changes", [{"emulate__mode": "sleep"}, {"model__kind": "hf"}], ids=str)
def test_stages_of_unknown_size_have_no_limit_by_bytes(changes):
    assert initial_problem(small(**WIDE, **changes, parallel__memory="1MB")).memory is None


@pytest.mark.parametrize("model", [{}, {"model__kind": "hf", "model__layers": None}], ids=["own", "other"])
def test_emulated_times_are_in_proportion_to_the_layers_of_a_stage(model):
    changes = {"model__layers": 4, "emulate__mode": "sleep"} | model
    even, uneven = (initial_problem(small(**changes, model__split=split)).durations for split in ([2, 2], [3, 1]))
    assert even["F"] == 0.02
    assert uneven["F"] == pytest.approx([0.03, 0.01]) and uneven["O"] == pytest.approx([0.09, 0.03])


def test_unmeasured_weight_gradients_of_adapters_are_planned_with_no_time():
    assert initial_problem(small(model__kind="hf", model__lora__rank=4)).durations["W"] == 0
    assert initial_problem(small(model__kind="hf")).durations["W"] == 1


def test_an_invalid_size_is_refused():
    with pytest.raises(
        ValueError, match=r"^parallel.memory must be auto, null or a size like 80GB: 'much' is not a size above 0"
    ):
        validate(small(parallel__memory="much"))


EMULATED = {"emulate__mode": "sleep", "parallel__pipelines": 3, "parallel__stages": 4}


def test_the_problem_of_another_layout_has_the_durations_of_a_job_that_starts_with_it():
    job = {**EMULATED, "model__layers": 8}
    other = small(**job, model__split=[3, 1, 2, 2])
    moved = relaid_problem(initial_problem(small(**job)), other, (2, 2, 2, 2), (3, 1, 2, 2))
    for kind in "FIWBO":
        assert moved.per_stage(kind) == pytest.approx(initial_problem(other).per_stage(kind))
    back = relaid_problem(moved, small(**job), (3, 1, 2, 2), (2, 2, 2, 2))
    assert back.per_stage("F") == pytest.approx(initial_problem(small(**job)).per_stage("F"))


def test_the_limits_by_bytes_follow_the_layers_and_other_limits_stay():
    job = WIDE | {"model__layers": 8, "parallel__memory": room_for(3.5, model__layers=8)}
    before = with_less_memory(initial_problem(small(**job)), Worker(1, 1), 3)
    more = small(**job, model__split=[5, 3])
    after = relaid_problem(before, more, (4, 4), (5, 3))
    assert after.memory == initial_problem(more).memory
    assert after.limit(Worker(0, 0)) < before.limit(Worker(0, 0))
    assert after.memory_limit == before.memory_limit
