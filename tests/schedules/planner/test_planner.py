"""The planner's guarantees: known optima, and plans that never get worse with more memory."""

import time

import pytest
from golden import golden
from hypothesis import given, settings
from hypothesis import strategies as st
from random_problems import EXAMPLES, problems, relaxed, remainders, sized
from recycle_schedules import Problem, Worker, plan
from recycle_schedules.validate import validate

HARDLY = 1.10
"""A limit above the worst ratio that occurred in some hundreds of random pairs (docs/planner.md)."""


def worked(**keys):
    return Problem(pipelines=3, stages=4, microbatches=6, **({"failed": [(1, 2)]} | keys))


def extra(k):
    return None if k is None else {"base": "1f1b", "extra": k}


@pytest.mark.parametrize(("backward", "failed", "optima"), [
    ("coupled", [(1, 2)], (36, 34, 33, 33)), ("decoupled", [(1, 2)], (32, 30, 29, 29)),
    ("decoupled", [], (24, 23, 22, 21)),
])  # fmt: skip
@pytest.mark.parametrize("k", [0, 1, 2, None])
def test_worked_example(backward, failed, optima, k):
    limits = {"optimizer": "barrier", "memory_limit": extra(k)}
    best = plan(worked(failed=failed, backward=backward, **limits), seconds=0.8)
    assert best.makespan == optima[-1 if k is None else k]


@pytest.mark.parametrize("memory", [None, [4, 3, 6, 1]])
def test_a_death_in_the_worked_example_costs_nothing_with_a_staggered_optimizer_and_memory(memory):
    best = plan(worked(backward="decoupled", memory_limit=memory, durations={"O": 3}), seconds=0.8)
    assert best.period == 27 + 3


def test_the_planner_splits_only_the_backwards_that_gain_by_it():
    best = plan(worked(memory_limit=extra(2), optimizer="barrier"))
    assert best.makespan == 29
    kinds = [op.kind for op in best.ops]
    assert kinds.count("B") > 0 and kinds.count("I") == kinds.count("W") > 0


SMALL = [
    case
    for case in golden()
    if case["proven_optimal"] and case["problem"]["pipelines"] * case["problem"]["microbatches"] <= 32
]


@pytest.mark.parametrize("case", SMALL, ids=[case["name"] for case in SMALL])
def test_small_golden_cases_reach_their_optimum(case):
    best = plan(Problem.from_json(case["problem"]), seconds=2.0)
    assert validate(best) == []
    assert best.value <= case["best"] + 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("case", golden(), ids=[case["name"] for case in golden()])
def test_golden_cases(case, judge):
    best = plan(Problem.from_json(case["problem"]), seconds=1.0)
    assert judge.validate(case["problem"], [op.to_json() for op in best.ops])["ok"]
    assert best.value <= case["best"] * 1.01 + 1e-6


def test_the_plan_for_a_death_at_a_late_stage_is_near_the_bound():
    """With little memory, the worker with the most micro-batches sends its last gradient just before the end. The
    gradient then passes through all earlier stages."""
    problem = Problem(pipelines=6, stages=16, microbatches=64, failed=[(1, 14)], memory_limit=extra(2))
    assert plan(problem).gap < 0.01


def test_an_idle_workers_optimizer_step_counts():
    problem = Problem(
        pipelines=2, stages=1, microbatches=1, durations={"O": 20}, speed={"1,0": 0.5}, reroute="any", memory_limit=1
    )
    best = plan(problem)
    assert best.period >= 40 and best.period >= best.lower_bound


@relaxed
@given(st.data())
def test_a_remainder_loses_no_op_and_repeats_no_op_of_a_survivor(data):
    """Even if more workers die while the remainder runs."""
    rest = plan(data.draw(problems()))
    for _ in range(2):
        left, _ = data.draw(remainders(rest))
        rest = plan(left)
        check_remainder(left, rest)


def check_remainder(left, rest):
    assert validate(rest) == []
    assert rest.value >= rest.lower_bound - 1e-6
    survived = {(e.op, e.microbatch, e.stage) for e in left.done if e.worker not in left.dead}
    ran = [(op.kind, op.microbatch, op.stage) for op in rest.ops if op.kind != "O"]
    assert not survived & set(ran)
    for mb in left.microbatch_keys():
        for s in range(left.stages):
            kinds = {k for k, m, t in [*survived, *ran] if (m, t) == (mb, s)}
            assert kinds in ({"F", "I", "W"}, {"F", "B"})


@st.composite
def more_memory(draw, problem):
    """A pair of problems: one whose limit is a number of micro-batches or 1F1B + k, and the same one with a limit that
    is at least as high at every stage."""
    k = draw(st.integers(1, 6))
    low, next_ = draw(st.sampled_from([(k, k + 1), (extra(k - 1), extra(k))]))
    tight = problem.replace(memory_limit=low)
    gifts = st.lists(st.integers(0, 2), min_size=problem.stages, max_size=problem.stages)
    uneven = [tight.limit(Worker(0, s)) + more for s, more in enumerate(draw(gifts))]
    return tight, problem.replace(memory_limit=draw(st.sampled_from([next_, uneven, None])))


@relaxed
@given(st.data())
def test_more_memory_is_never_worse_than_a_number_or_1f1b(data):
    tight, roomy = data.draw(more_memory(data.draw(problems())))
    better = plan(roomy)
    assert validate(better) == []
    assert better.value <= plan(tight).value * (1 + 1e-6)


@settings(relaxed, max_examples=EXAMPLES // 2)
@given(st.data())
def test_more_memory_is_never_worse_in_larger_problems(data):
    """These problems have up to a thousand ops."""
    tight, roomy = data.draw(more_memory(data.draw(problems(most_pipelines=6, most_stages=6, most_microbatches=10))))
    better = plan(roomy)
    assert validate(better) == []
    assert better.value <= plan(tight).value * (1 + 1e-6)


@relaxed
@given(problems(), st.data())
def test_more_memory_at_one_stage_is_hardly_ever_worse(problem, data):
    limits = data.draw(st.lists(st.integers(1, 6), min_size=problem.stages, max_size=problem.stages))
    s = data.draw(st.integers(0, problem.stages - 1))
    more = [limit + (t == s) for t, limit in enumerate(limits)]
    tight, roomy = (plan(problem.replace(memory_limit=m)) for m in (limits, more))
    assert roomy.value <= tight.value * HARDLY


@relaxed
@given(problems(reroute="any", speed={}, memory_limit={"base": "1f1b", "extra": 1}))
def test_one_more_worker_is_hardly_ever_worse(problem):
    if problem.dead:
        more = problem.replace(failed=sorted(problem.dead)[1:])
        assert plan(more).value <= plan(problem).value * HARDLY


def test_times_may_be_measured_seconds():
    durations = {"F": [0.0123, 0.0119, 0.0131, 0.0145], "I": 0.0127, "W": 0.0098, "B": 0.0216, "O": 0.0031}
    problem = worked(durations=durations, send=0.00021, allreduce=0.0007, memory_limit=extra(2))
    best = plan(problem)
    assert validate(best) == []
    thousand = plan(problem.replace(durations={k: [1e3 * x for x in v] if isinstance(v, list) else 1e3 * v
                                               for k, v in durations.items()}, send=0.21, allreduce=0.7))  # fmt: skip
    assert thousand.value == pytest.approx(1e3 * best.value, rel=1e-6)


def test_a_slow_worker_gets_a_smaller_share():
    problem = Problem(pipelines=3, stages=2, microbatches=8, speed={"1,0": 0.5}, reroute="any")
    share = lambda d: sum(op.kind == "F" for op in plan(problem).of(Worker(d, 0)))  # noqa: E731
    assert share(1) < share(0)


LONG_TIMES = {
    "ops": {"durations": {"F": 1e10, "I": 1e10, "W": 1e10}},
    "one op": {"durations": {"F": 1e13, "I": 1, "W": 0.01}},
    "messages": {"send": 1e12},
    "re-routed messages": {"send_rerouted": 1e12, "failed": [(1, 1)]},
    "a slow worker": {"speed": {"1,1": 1e-12}},
    "reductions": {"allreduce": 1e14},
    "busy workers": {"busy_until": {"0,0": 1e12}},
    "links": {"links": {"hosts": [["a"] * 4, ["b"] * 4], "within_host": {"latency": 1e12}}},
}


@pytest.mark.parametrize("keys", LONG_TIMES.values(), ids=LONG_TIMES)
@pytest.mark.parametrize("microbatches", [6, 128])
def test_plans_of_problems_with_long_times_are_valid(keys, microbatches):
    best = plan(Problem(pipelines=2, stages=4, microbatches=microbatches, **keys))
    assert validate(best) == []
    assert best.gap >= -1e-9


def test_plans_keep_a_limit_that_is_not_a_whole_number():
    problem = Problem(
        pipelines=2, stages=3, microbatches=5, memory_limit=2.5, backward="coupled", optimizer="barrier"
    )  # fmt: skip
    assert validate(plan(problem)) == []


def test_an_attempt_with_one_worker_fewer_keeps_the_limits_of_the_live_workers():
    """If W(0,0) were dead, its peer would recompute and so hold more micro-batches than its limit now."""
    stage = {"weights": 2, "state": 16, "copies": 1, "sums": 2, "flight": 4, "waiting": 4, "op": 0.5, "whole_op": 0.5}
    memory = {"capacity": 28, "stages": [stage] * 2, "recomputed": [stage | {"flight": 1}] * 2, "least": 1}
    keys = {"memory": memory, "reroute": "any", "speed": {"0,0": 0.3}, "durations": {"F": 0.2, "O": 1}}
    assert validate(plan(Problem(pipelines=2, stages=2, microbatches=2, **keys))) == []


@relaxed
@given(sized(reroute="any", memory_limit=None))
def test_plans_of_problems_with_bytes_are_valid(problem):
    assert validate(plan(problem)) == []


def test_large_jobs_are_planned_in_blocks_and_stay_valid():
    problem = Problem(
        pipelines=50, stages=16, microbatches=220, failed=[(1, 2), (5, 3), (9, 3), (33, 7)],
        memory_limit=extra(2), durations={"O": 1},
    )  # fmt: skip
    best = plan(problem)
    assert type(best).__name__ != "Plan"
    assert validate(best) == []
    assert best.gap < 0.15


def test_a_search_ends_in_time_or_at_the_optimum():
    begin = time.perf_counter()
    plan(worked(memory_limit=extra(0)), seconds=0.3)
    assert time.perf_counter() - begin < 2.0
