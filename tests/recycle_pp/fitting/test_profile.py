"""The profile has measured times for the planner, and detects slow workers."""

import json
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recycle_schedules import Problem, Worker, plan

from recycle_pp.config.compose import compose
from recycle_pp.fitting.drift import FIRST
from recycle_pp.fitting.latency_breakdown import breakdown_of
from recycle_pp.fitting.layer_values import relaid
from recycle_pp.fitting.problem import initial_problem
from recycle_pp.fitting.profile import Profile
from recycle_pp.fitting.slowness import Speed
from recycle_pp.timing.packing import pack, unpack

TURN, MESSAGE, SUM = 0.0005, 0.002, 0.01  # seconds
SETTINGS = compose(["parallel=2x2", "emulate=sleep", "schedule.profile_steps=3"])
TRUE = Problem(
    pipelines=2,
    stages=2,
    microbatches=SETTINGS.parallel.microbatches,
    durations={"F": [0.02, 0.03], "I": [0.02, 0.03], "W": [0.01, 0.02], "O": 0.05},
    send=MESSAGE,
    allreduce=SUM,
    optimizer="barrier",
    backward="decoupled",
)


def executed(problem=TRUE, slow=None, origin=0.0):
    """Spans of workers that follow the plan of `problem`: those of the step, then those of its optimizer steps."""
    slow = slow or {}
    compute, optimizer = {}, {}
    for op in plan(problem).ops:
        start, end = origin + op.start, origin + op.end
        if op.kind == "O":
            optimizer.setdefault(op.worker, []).append(["O", 0, 0, start, end])
        else:
            end = start + (end - start - TURN) * slow.get(op.worker, 1.0)
            compute.setdefault(op.worker, []).append([op.kind, *op.microbatch, start, end])
    return compute, optimizer


def tables(spans):
    return {w: unpack(pack(of)) for w, of in spans.items()}


def steps(count, slow=None, of=TRUE):
    """The arguments of `add` for each step. The optimizer's spans of a step are passed with those of the next step."""
    before = {}
    for step in range(count):
        compute, optimizer = executed(of, slow=slow, origin=float(step))
        yield step, {w: unpack(pack(before.get(w, []) + ops)) for w, ops in compute.items()}
        before = optimizer


def complete_profile():
    profile = Profile(SETTINGS)
    for _, spans in steps(3):
        assert profile.add(spans) == []
    return profile


def test_the_breakdown_separates_turns_messages_and_sums():
    compute, optimizer = executed()
    found = breakdown_of(tables(compute), tables(optimizer), barrier=True)
    assert median(found.turns) == pytest.approx(TURN)
    seconds = [x for times in found.messages.values() for x in times]
    assert median(seconds) == pytest.approx(MESSAGE + TURN)  # `executed` ends every span a turn early
    assert {(a.pipeline, abs(a.stage - b.stage)) for a, b in found.messages} == {(0, 1), (1, 1)}
    assert found.sums == pytest.approx({0: SUM + TURN, 1: SUM + TURN})


def test_the_plan_of_a_complete_profile_is_as_long_as_the_measured_steps():
    profile = complete_profile()
    measured = profile.problem(initial_problem(SETTINGS)).replace(backward="decoupled", memory_limit=None)
    assert plan(measured).makespan == pytest.approx(plan(TRUE).makespan, rel=0.03)


def test_before_the_profile_is_complete_an_emulated_job_is_planned_with_its_settings():
    assert Profile(SETTINGS).problem(initial_problem(SETTINGS)) == initial_problem(SETTINGS)


def test_a_real_job_runs_every_kind_of_backward_while_it_measures():
    settings = compose(["parallel=2x2", "schedule.profile_steps=3"])
    profile, seen = Profile(settings), []
    for _, spans in steps(3):
        seen.append(profile.problem(initial_problem(settings)).backward)
        profile.add(spans)
    assert seen == ["decoupled", "decoupled", "coupled"]
    assert profile.problem(initial_problem(settings)).backward == settings.schedule.backward


def two_hosts(profile, between, within=(0.0005, 1e12)):
    """Stage 0 runs on one host and stage 1 on another. Links are (seconds one way, bytes a second)."""
    for d in range(2):
        for s in range(2):
            profile.place(Worker(d, s), f"node{s}", cores=8)
    profile.describe(0, boundary_bytes=4000, deferred_share=1.0)
    profile.links.measured("node0", {"node0": within, "node1": between})
    return profile


def test_different_links_are_part_of_the_plan_and_messages_keep_their_measured_time():
    """A message takes 2.5 ms, of which the link accounts for 2.1. The rest is added to each message."""
    profile = two_hosts(Profile(SETTINGS), between=(0.0021, 1e15), within=(0.0001, 1e15))
    for _, spans in steps(3):
        profile.add(spans)
    problem = profile.problem(initial_problem(SETTINGS))
    assert problem.send == 0 and problem.graph.between(Worker(0, 0), Worker(1, 1)) == pytest.approx(MESSAGE + TURN)
    assert problem.graph.links.within_host.latency == pytest.approx(MESSAGE + TURN - 0.002)
    plain = complete_profile().problem(initial_problem(SETTINGS))
    assert problem.replace(links=None, send=plain.send) == plain, "nothing else is different"


def test_equal_links_change_no_bit_of_the_plan():
    profile = two_hosts(Profile(SETTINGS), between=(0.0009, 1e12))
    for _, spans in steps(3):
        profile.add(spans)
    problem = profile.problem(initial_problem(SETTINGS))
    assert problem == complete_profile().problem(initial_problem(SETTINGS)) and problem.graph.uniform


def test_links_of_an_emulated_job_are_part_of_its_first_plan():
    problem = two_hosts(Profile(SETTINGS), between=(0.1, 1e12)).problem(initial_problem(SETTINGS))
    assert problem.graph.between(Worker(0, 0), Worker(0, 1)) == pytest.approx(0.1)


def test_a_run_folder_has_the_links_for_the_next_coordinator():
    profile = two_hosts(Profile(SETTINGS), between=(0.1, 1e12))
    for _, spans in steps(3):
        profile.add(spans)
    successor = Profile(SETTINGS)
    successor.load(json.loads(json.dumps(profile.to_json())))
    assert successor.problem(initial_problem(SETTINGS)) == profile.problem(initial_problem(SETTINGS))


def test_plans_use_the_speed_of_a_slow_worker_until_it_recovers():
    profile, slow = complete_profile(), Worker(0, 1)
    (_, usual), *_ = steps(1)
    for _ in range(7):
        assert profile.add(usual) == []
    (_, spans), *_ = steps(1, {slow: 3.0})
    assert [profile.add(spans) for _ in range(4)] == [[]] * 4  # too few steps
    [speed] = profile.add(spans)
    assert (speed.worker, speed.factor) == (slow, pytest.approx(3.0, rel=0.1))
    problem = profile.problem(initial_problem(SETTINGS))
    assert (problem.reroute, problem.speed["0,1"]) == ("any", pytest.approx(1 / 3, rel=0.1))
    shares = [sum(op.kind == "F" and op.worker == Worker(d, 1) for op in plan(problem).ops) for d in (0, 1)]
    assert shares[0] < shares[1]

    assert profile.add(spans) == []  # as slow as before
    for _ in range(2):
        assert profile.add(usual) == []
    assert [speed for _ in range(2) for speed in profile.add(usual)] == [Speed(slow, 1.0)]
    assert profile.problem(initial_problem(SETTINGS)).speed == {}


def test_recomputing_is_not_part_of_durations_and_makes_no_worker_slow():
    again = (True, False)
    profile, other = Profile(SETTINGS), complete_profile()
    recomputed = TRUE.replace(durations={**TRUE.durations, "I": [0.04, 0.03]})  # I of stage 0 repeats its F
    for _, spans in steps(3, of=recomputed):
        assert profile.add(spans, again) == []
    for kind in "FIW":
        assert profile.problem(TRUE).per_stage(kind) == pytest.approx(other.problem(TRUE).per_stage(kind), rel=0.05)
    assert profile.seconds(Worker(0, 0), "I") == pytest.approx(0.04, rel=0.05)
    for way, of in ((again, recomputed), ((False, False), TRUE)) * 5:
        (_, spans), *_ = steps(1, of=of)
        assert profile.add(spans, way) == []
    assert not profile.problem(TRUE).speed


def test_no_worker_counts_as_slow_if_all_slow_down_alike():
    profile = complete_profile()
    everybody = {Worker(d, s): 3.0 for d in range(2) for s in range(2)}
    (_, spans), *_ = steps(1, everybody)
    assert [profile.add(spans) for _ in range(20)] == [[]] * 20


def test_waiting_for_a_core_makes_no_worker_slow():
    busy = Profile(SETTINGS)
    for n, (_, spans) in enumerate(steps(30)):
        for table in spans.values():
            table[:, 4] += 0.01 * (n % 7)  # later end, same own time
        assert busy.add(spans) == []


@pytest.mark.parametrize("factor", [2.0, 4.0])
def test_a_worker_that_is_slow_from_the_first_step_is_detected_and_its_times_are_left_out(factor):
    profile, slow = Profile(SETTINGS), Worker(0, 1)
    reported = [speed for _, spans in steps(3 + 8, {slow: factor}) for speed in profile.add(spans)]
    [speed] = reported
    assert speed.worker == slow and speed.factor > 1.5
    other = complete_profile()
    for kind in "FIW":
        for worker in (Worker(0, 0), Worker(1, 1)):
            assert profile.seconds(worker, kind) == pytest.approx(other.seconds(worker, kind), rel=0.01)


@settings(max_examples=5, deadline=None)
@given(st.floats(1.0, 1.5))
def test_usual_differences_on_busy_cores_make_no_worker_slow(factor):
    profile = Profile(SETTINGS)
    for _, spans in steps(30, {Worker(0, 1): factor}):
        assert profile.add(spans) == []


EVEN, MOVED = (4, 4), (5, 3)
AFTER = TRUE.replace(durations={"F": [0.026, 0.021], "I": [0.024, 0.024], "W": [0.013, 0.014], "O": 0.05})
"""The true times of the moved layout. They differ from the prediction, which assumes equal layers."""


def moved_profile(slow=None):
    """A complete profile of even stages, whose layers have then moved. slow: workers that were slow before the move."""
    profile = Profile(SETTINGS)
    profile.relayout(EVEN)
    for spans in (*steps(10), *steps(12, slow)):
        profile.add(spans[1])
    profile.relayout(MOVED)
    return profile


def test_after_a_move_the_profile_predicts_the_stages_and_then_measures_them_again():
    profile, predicted = moved_profile(), complete_profile().problem(TRUE)
    for n, (_, spans) in enumerate(steps(8, of=AFTER)):
        now = profile.problem(TRUE)
        assert now.backward == SETTINGS.schedule.backward, "a measurement changes no plan"
        measured = n >= 4  # a step of warm-up, then three measured ones
        for kind in "FIW":
            expected = AFTER.per_stage(kind) if measured else relaid(predicted.per_stage(kind), EVEN, MOVED)
            assert now.per_stage(kind) == pytest.approx(expected, rel=0.03 if measured else 1e-9)
        assert profile.measured == 1 + measured
        assert profile.add(spans) == [], "no worker is slow or fast because its stage has other layers"
    assert profile.problem(TRUE).per_stage("B") == pytest.approx(relaid(predicted.per_stage("B"), EVEN, MOVED))


@pytest.mark.parametrize("factor", [1.5, 3.0])
def test_a_slow_worker_stays_slow_while_layers_move(factor):
    slow = Worker(0, 1)
    profile = moved_profile({slow: factor})
    before = profile.problem(TRUE).speed
    assert before.keys() == {"0,1"}
    for _, spans in steps(20, {slow: factor}, of=AFTER):
        assert profile.add(spans) == []
    assert profile.problem(TRUE).speed["0,1"] == pytest.approx(before["0,1"], rel=0.3)
    assert profile.problem(TRUE).per_stage("F") == pytest.approx(AFTER.per_stage("F"), rel=0.03)


def test_a_worker_that_becomes_slow_after_a_move_is_found():
    profile, slow = moved_profile(), Worker(0, 1)
    for _, spans in steps(12, of=AFTER):
        profile.add(spans)
    found = [speed for _, spans in steps(12, {slow: 3.0}, of=AFTER) for speed in profile.add(spans)]
    assert [(of.worker, of.factor) for of in found] == [(slow, pytest.approx(3.0, rel=0.1))]


def test_the_next_coordinator_knows_the_layout_of_the_measured_times():
    profile = moved_profile()
    successor = Profile(SETTINGS)
    data = json.loads(json.dumps(profile.to_json()))
    assert successor.fits(data) and not successor.fits(data | {"layout": [1, 2, 3]})
    successor.load(data)
    successor.relayout(EVEN)  # the layout that the workers report
    before = complete_profile().problem(TRUE)
    assert successor.problem(TRUE).per_stage("F") == pytest.approx(before.per_stage("F"))


def test_the_next_coordinator_finds_a_slowdown_of_all_workers_against_their_first_steps():
    """Medians of peers cannot show it."""
    profile = Profile(SETTINGS)
    hosts = {Worker(d, s): f"host{d}" for d in range(2) for s in range(2)}
    for worker, host in hosts.items():
        profile.place(worker, host, 8)
    written = []
    for _, spans in steps(3 + FIRST):
        before = profile.learned
        profile.add(spans)
        written += [json.dumps(profile.to_json())] * (profile.learned != before)
    assert len(written) == 2, "after the profiled steps, and after the first hundred"
    successor = Profile(SETTINGS)
    successor.load(json.loads(written[-1]))
    moved = next(iter(hosts))
    for worker, host in hosts.items():
        successor.place(worker, "elsewhere" if worker == moved else host, 8)
    found = [speed for _, spans in steps(30, dict.fromkeys(hosts, 2.0)) for speed in successor.add(spans)]
    assert {of.worker for of in found} == hosts.keys() - {moved}, "a worker on another machine has no first steps yet"
    assert all(of.against == "itself" and of.factor == pytest.approx(2.0, rel=0.1) for of in found)
