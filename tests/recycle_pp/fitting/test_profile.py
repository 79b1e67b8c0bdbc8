"""The profile: times by which the planner plans, and workers that have become slow."""

import json
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recycle_schedules import Problem, Worker, plan

from recycle_pp.config.compose import compose
from recycle_pp.fitting.latency_breakdown import breakdown_of
from recycle_pp.fitting.problem import initial_problem
from recycle_pp.fitting.profile import Profile
from recycle_pp.fitting.slowness import Speed
from recycle_pp.telemetry.packing import pack, unpack

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
    """Spans of a step and of the optimizer steps after it, as workers report them that follow the plan of `problem`."""
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
    """What `add` gets step by step: a step's optimizer spans come with the next one."""
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


def test_gaps_tell_turns_messages_and_sums_apart():
    compute, optimizer = executed()
    found = breakdown_of(tables(compute), tables(optimizer), barrier=True)
    assert median(found.turns) == pytest.approx(TURN)
    seconds = [x for times in found.messages.values() for x in times]
    assert median(seconds) == pytest.approx(MESSAGE + TURN)  # the spans end a turn early
    assert {(a.pipeline, abs(a.stage - b.stage)) for a, b in found.messages} == {(0, 1), (1, 1)}
    assert found.sums == pytest.approx({0: SUM + TURN, 1: SUM + TURN})


def test_the_plan_of_a_complete_profile_takes_as_long_as_the_steps_that_were_measured():
    profile = complete_profile()
    measured = profile.problem(initial_problem(SETTINGS)).replace(backward="decoupled", memory_limit=None)
    assert plan(measured).makespan == pytest.approx(plan(TRUE).makespan, rel=0.03)


def test_an_emulated_job_is_planned_as_it_was_told_until_the_profile_is_complete():
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
    """Stage 0 runs on one host and stage 1 on another; the links have these seconds one way and bytes a second."""
    for d in range(2):
        for s in range(2):
            profile.place(Worker(d, s), f"node{s}", cores=8)
    profile.describe(0, boundary_bytes=4000, deferred_share=1.0)
    profile.links.measured("node0", {"node0": within, "node1": between})
    return profile


def test_links_that_differ_are_planned_with_and_a_message_takes_as_long_as_it_was_measured_to():
    """2.5 ms of them, on a link that explains 2.1: the rest is what any message takes."""
    profile = two_hosts(Profile(SETTINGS), between=(0.0021, 1e15), within=(0.0001, 1e15))
    for _, spans in steps(3):
        profile.add(spans)
    problem = profile.problem(initial_problem(SETTINGS))
    assert problem.send == 0 and problem.graph.between(Worker(0, 0), Worker(1, 1)) == pytest.approx(MESSAGE + TURN)
    assert problem.graph.links.within_host.latency == pytest.approx(MESSAGE + TURN - 0.002)
    plain = complete_profile().problem(initial_problem(SETTINGS))
    assert problem.replace(links=None, send=plain.send) == plain, "nothing else is different"


def test_links_that_are_alike_change_no_bit_of_the_plan():
    profile = two_hosts(Profile(SETTINGS), between=(0.0009, 1e12))
    for _, spans in steps(3):
        profile.add(spans)
    problem = profile.problem(initial_problem(SETTINGS))
    assert problem == complete_profile().problem(initial_problem(SETTINGS)) and problem.graph.uniform


def test_an_emulated_job_is_planned_with_its_links_from_the_first_step_on():
    problem = two_hosts(Profile(SETTINGS), between=(0.1, 1e12)).problem(initial_problem(SETTINGS))
    assert problem.graph.between(Worker(0, 0), Worker(0, 1)) == pytest.approx(0.1)


def test_a_run_folder_has_the_links_for_the_next_coordinator():
    profile = two_hosts(Profile(SETTINGS), between=(0.1, 1e12))
    for _, spans in steps(3):
        profile.add(spans)
    successor = Profile(SETTINGS)
    successor.take_up(json.loads(json.dumps(profile.to_json())))
    assert successor.problem(initial_problem(SETTINGS)) == profile.problem(initial_problem(SETTINGS))


def test_a_worker_that_gets_slow_is_planned_with_its_speed_until_it_is_as_fast_as_before():
    profile, slow = complete_profile(), Worker(0, 1)
    (_, usual), *_ = steps(1)
    for _ in range(7):
        assert profile.add(usual) == []
    (_, spans), *_ = steps(1, {slow: 3.0})
    assert [profile.add(spans) for _ in range(4)] == [[]] * 4  # bad luck, until it lasts
    [speed] = profile.add(spans)
    assert (speed.worker, speed.factor) == (slow, pytest.approx(3.0, rel=0.1))
    problem = profile.problem(initial_problem(SETTINGS))
    assert (problem.reroute, problem.speed["0,1"]) == ("any", pytest.approx(1 / 3, rel=0.1))
    shares = [sum(op.kind == "F" and op.worker == Worker(d, 1) for op in plan(problem).ops) for d in (0, 1)]
    assert shares[0] < shares[1]

    assert profile.add(spans) == []  # as slow as before: no new plan
    for _ in range(2):
        assert profile.add(usual) == []
    assert [speed for _ in range(2) for speed in profile.add(usual)] == [Speed(slow, 1.0)]
    assert profile.problem(initial_problem(SETTINGS)).speed == {}


def test_what_a_stage_recomputes_is_no_part_of_its_durations_and_makes_nobody_slow():
    again = (True, False)
    profile, other = Profile(SETTINGS), complete_profile()
    recomputed = TRUE.replace(durations={**TRUE.durations, "I": [0.04, 0.03]})  # an F more
    for _, spans in steps(3, of=recomputed):
        assert profile.add(spans, again) == []
    for kind in "FIW":
        assert profile.problem(TRUE).per_stage(kind) == pytest.approx(other.problem(TRUE).per_stage(kind), rel=0.05)
    assert profile.seconds(Worker(0, 0), "I") == pytest.approx(0.04, rel=0.05)
    for way, of in ((again, recomputed), ((False, False), TRUE)) * 5:
        (_, spans), *_ = steps(1, of=of)
        assert profile.add(spans, way) == []
    assert not profile.problem(TRUE).speed


def test_where_everybody_slows_down_alike_nobody_is_slow():
    profile = complete_profile()
    everybody = {Worker(d, s): 3.0 for d in range(2) for s in range(2)}
    (_, spans), *_ = steps(1, everybody)
    assert [profile.add(spans) for _ in range(20)] == [[]] * 20


def test_what_ops_wait_for_a_core_makes_nobody_slow():
    busy = Profile(SETTINGS)
    for n, (_, spans) in enumerate(steps(30)):
        for table in spans.values():
            table[:, 4] += 0.01 * (n % 7)  # ends later, its own time is the same
        assert busy.add(spans) == []


@pytest.mark.parametrize("factor", [2.0, 4.0])
def test_a_worker_that_is_slow_from_the_first_step_on_is_found_and_others_are_planned_without_its_times(factor):
    profile, slow = Profile(SETTINGS), Worker(0, 1)
    told = [speed for _, spans in steps(3 + 8, {slow: factor}) for speed in profile.add(spans)]
    [speed] = told
    assert speed.worker == slow and speed.factor > 1.5
    other = complete_profile()
    for kind in "FIW":
        for worker in (Worker(0, 0), Worker(1, 1)):
            assert profile.seconds(worker, kind) == pytest.approx(other.seconds(worker, kind), rel=0.01)


@settings(max_examples=5, deadline=None)
@given(st.floats(1.0, 1.5))
def test_what_peers_differ_by_on_busy_cores_while_it_is_measured_makes_nobody_slow(factor):
    profile = Profile(SETTINGS)
    for _, spans in steps(30, {Worker(0, 1): factor}):
        assert profile.add(spans) == []
