"""Memory limits in bytes: what fits, how the limits depend on the live workers, and which limits plan files contain."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recycle_schedules import Plan, Problem, StageMemory, Worker, plan
from recycle_schedules.analysis.what_if import what_if
from recycle_schedules.in_flight import peaks
from recycle_schedules.planner.store import PlanStore
from recycle_schedules.validate import validate


def stage(**changes: float) -> StageMemory:
    plain = StageMemory(
        weights=40, state=120, copies=0, sums=80, gradient=40, staggered=False, boundary=1, flight=10, waiting=9,
        op=5, payload=80, received=80, restored=40, update=10, saved=0,
    )  # fmt: skip
    return replace(plain, **changes)


def test_the_peak_is_the_memory_of_the_fullest_phase():
    assert stage().peak(peers=2, ran=4, in_flight=3) == {
        "weights": 40, "optimizer state": 120, "sums": 80, "replay log": 4, "reduction": 120,
    }  # fmt: skip
    assert stage().peak(peers=2, ran=4, in_flight=13)["activations"] == 135
    assert stage(saved=160).peak(peers=2, ran=4, in_flight=3)["checkpoint"] == 160
    assert stage(staggered=True).peak(peers=2, ran=4, in_flight=9)["reduced gradient"] == 40


def test_each_dead_worker_of_a_stage_costs_its_peers_a_communicator_for_each_adjacent_stage():
    of = stage(communicator=7, adjacent=2, pipelines=4)
    assert [of.always(peers, 0)["communicators"] / 7 for peers in (4, 3, 2)] == [3, 5, 7]
    assert stage(communicator=7, adjacent=1, pipelines=1).always(1, 0)["communicators"] == 7, (
        "without peers there is no communicator for the sum"
    )
    assert "communicators" not in stage().always(4, 0)


def test_shards_and_received_bytes_depend_on_the_number_of_live_peers():
    assert [stage(copies=2).share(n) for n in (1, 2, 4, 8)] == [1, 1, 0.5, 0.25]
    assert stage(copies=2).always(8, 0)["optimizer state"] == 30
    ahead = stage(copies=2, arriving=40, gradient=0)
    assert [ahead.moments(n, 0)["update"]["update"] for n in (2, 4, 8)] == [10, 20, 30], (
        "each worker receives the blocks that it does not hold"
    )
    assert stage().outside_compute(1) == 80 + 40 and stage().outside_compute(4) == 80 + 60


@given(st.integers(0, 1000), st.integers(1, 8), st.integers(0, 30), st.sampled_from([0, 2]), st.booleans())
def test_in_flight_is_the_largest_number_whose_peak_fits(capacity, peers, ran, copies, staggered):
    of = stage(copies=copies, staggered=staggered)
    n = of.in_flight(capacity, peers, ran)
    peak = lambda k: sum(of.peak(peers, ran, k).values())  # noqa: E731
    if n:
        assert peak(n) <= capacity + 1e-6
    assert peak(n + 1) > capacity - 1e-6


def job(capacity: object, failed: object = (), least: int = 0, **changes: float) -> Problem:
    """Three pipelines of three stages. A worker permanently needs 240 bytes, plus 1 per micro-batch that it runs."""
    of = stage(received=0, payload=0, restored=0, gradient=0, update=0, **changes)
    memory = {"capacity": capacity, "stages": [asdict(of)] * 3, "least": least}
    return Problem(pipelines=3, stages=3, microbatches=6, failed=failed, memory=memory)


def test_a_death_leaves_less_room_on_its_peers():
    room = 40 + 120 + 80 + 5 + 6  # permanent memory, one op, six micro-batches in the replay log
    whole, after = job(room + 33), job(room + 33, failed=[(1, 2)])
    assert [whole.limit(Worker(0, s)) for s in range(3)] == [3, 3, 3]
    assert [after.limit(Worker(0, s)) for s in range(3)] == [3, 3, 3]
    # The replay log has nine boundary tensors instead of six.
    assert job(room + 32, failed=[(1, 2)]).limit(Worker(0, 2)) == 2
    sharded = job(room + 33, failed=[(1, 2)], copies=2)
    assert sharded.limit(Worker(0, 2)) == 3 and sharded.limit(Worker(0, 1)) > 3


def test_room_is_the_memory_that_a_worker_never_uses():
    always, worker = 40 + 120 + 80 + 5 + 6, Worker(0, 2)
    assert job(always + 33).room(worker) == 3, "three micro-batches in flight use the rest"
    assert job(always + 33, failed=[(1, 2)]).room(worker) == 0, "three more boundary tensors use the room"
    assert job(always + 233).room(worker) == 233 - 60, "all six micro-batches of the worker fit in flight"
    assert job(always + 33).replace(memory_limit=1).room(worker) == 23
    assert job(always, least=1).room(worker) == -10
    assert job(None).room(worker) == math.inf


def choosing(capacity: float, failed: object = (), **changes: object) -> Problem:
    """Like `job`, but stages may recompute. With recomputation a micro-batch in flight takes 2 bytes instead of 10 (20
    while it waits for its W)."""
    of = stage(received=0, payload=0, restored=0, gradient=0, update=0, waiting=20)
    again = replace(of, flight=2, whole_op=5)
    memory = {"capacity": capacity, "stages": [asdict(of)] * 3, "recomputed": [asdict(again)] * 3}
    return Problem(pipelines=3, stages=3, microbatches=6, failed=failed, memory=memory, **changes)


def test_stages_short_of_memory_run_whole_backwards_and_then_recompute():
    room = 40 + 120 + 80 + 5 + 6
    modes = lambda problem: [(mode.whole, mode.recompute) for mode in problem.modes]  # noqa: E731
    split, whole, again = (False, False), (True, False), (True, True)
    assert modes(choosing(room + 60)) == [split, split, split]
    assert modes(choosing(room + 30)) == [whole, whole, split]
    assert modes(choosing(room + 20)) == [again, whole, split]
    assert modes(choosing(room + 20, backward="coupled")) == [again, whole, whole]
    assert modes(choosing(room + 20, backward="decoupled")) == [split, split, split], (
        "with decoupled backwards recomputation would save nothing"
    )
    nothing = choosing(room + 20)
    nothing = nothing.replace(memory=nothing.memory | {"capacity": 0, "least": 1})
    assert modes(nothing) == [again, again, again], "least=1 allows one micro-batch, in the smallest mode"


def test_after_a_death_peers_may_have_to_recompute_which_lengthens_their_backward_by_a_forward():
    room = 40 + 120 + 80 + 6 + 30
    before, after = choosing(room), choosing(room, failed=[(1, 0)])
    assert before.recomputes == (False, False, False) and after.recomputes == (True, False, False)
    assert [after.per_stage("I")[0] - before.per_stage("I")[0], after.per_stage("B")[0] - before.per_stage("B")[0]] == [
        1, 1,
    ]  # fmt: skip
    ran = {op.kind for op in plan(after).ops if op.stage == 0}
    assert {"F", "B"} <= ran and not {"I", "W"} & ran
    read = Plan.from_json(json.loads(json.dumps(plan(after).to_json())))
    assert validate(read) == [] and read.problem.coupled == after.coupled
    assert read.problem.per_stage("B") == after.per_stage("B")


def test_the_judge_accepts_plan_files_which_have_no_memory_key(judge):
    data = plan(choosing(40 + 120 + 80 + 6 + 30, failed=[(1, 0)])).to_json()
    assert data["whole"] == [0, 1] and judge.validate(data["problem"], data["ops"])["errors"] == []


def test_a_worker_may_have_a_smaller_capacity_than_the_others():
    problem = job({"default": None, "1,0": 275})
    assert problem.limit(Worker(1, 0)) == 2 and problem.limit(Worker(0, 0)) == float("inf")
    assert peaks(plan(problem))[Worker(1, 0)] <= 2
    assert what_if(problem).now.value == plan(problem).value


def test_a_problem_without_room_for_one_micro_batch_is_rejected_unless_least_is_one():
    with pytest.raises(ValueError, match=r"^memory: worker 0.0 has no room for a micro-batch"):
        job(255)
    assert job(255, least=1).limit(Worker(0, 0)) == 1


@pytest.mark.parametrize(
    ("memory", "sentence"),
    [
        ({"capacity": 1e9}, "memory: expected an object with the keys capacity and stages"),
        ({"capacity": 1e9, "stages": []}, "memory.stages: expected 3 objects"),
        ({"capacity": 1e9, "stages": [{}] * 3, "recomputed": [{}]}, "memory.recomputed: expected 3 objects"),
        ({"capacity": -1, "stages": [{}] * 3}, "memory.capacity.default: -1 is not a number of bytes"),
        ({"capacity": {"9,9": 1}, "stages": [{}] * 3}, "memory.capacity: worker 9.9 does not exist"),
        ({"capacity": 1, "stages": [{"wieghts": 1}] * 3}, "memory.stages: 'wieghts' of stage 0 is not one of"),
        ({"capacity": 1, "stages": [{"op": "x"}] * 3}, "memory.stages.op: 'x' is not a number of bytes"),
    ],
)
def test_a_mistake_is_reported_in_one_sentence(memory, sentence):
    with pytest.raises(ValueError, match=f"^{sentence}"):
        Problem(pipelines=2, stages=3, microbatches=2, memory=memory)


def test_a_plan_file_contains_the_resulting_limits_instead_of_the_memory_key():
    made = plan(job(280, failed=[(1, 2)]))
    file = json.loads(json.dumps(made.to_json()))
    assert "memory" not in file["problem"]
    read = Plan.from_json(file)
    assert validate(read) == []
    assert all(read.problem.limit(w) == made.problem.limit(w) for w in made.problem.workers())


def test_plans_prepared_for_a_death_keep_the_limits_that_apply_after_it():
    store = PlanStore()
    now = job(285)
    store.plan(now)
    for problem in store.ahead(now):
        made = store.plan(problem).plan
        assert all(held <= problem.limit(w) for w, held in peaks(made).items())


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 4), st.integers(1, 4), st.integers(1, 6), st.integers(262, 400), st.sampled_from([0, 2]), st.data()
)
def test_no_plan_exceeds_the_memory_of_its_workers(pipelines, stages, microbatches, capacity, copies, data):
    dead = data.draw(st.sets(st.tuples(st.integers(1, max(1, pipelines - 1)), st.integers(0, stages - 1)), max_size=2))
    dead = {w for w in dead if w[0] < pipelines}
    of = stage(received=0, payload=0, restored=0, gradient=0, update=0, copies=copies)
    memory = {"capacity": capacity, "stages": [of] * stages, "least": 0}
    try:
        problem = Problem(pipelines=pipelines, stages=stages, microbatches=microbatches, failed=dead, memory=memory)
    except ValueError:
        return
    made = plan(problem)
    assert validate(made) == []
    for worker, held in peaks(made).items():
        peers = len(problem.live[worker.stage])
        assert sum(of.peak(peers, -(-problem.total // peers), held).values()) <= capacity
