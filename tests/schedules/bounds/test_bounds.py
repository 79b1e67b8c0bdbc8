"""No plan beats a bound, and no bound is weaker than the judge's."""

from golden import golden
from hypothesis import HealthCheck, given, settings
from random_problems import problems
from recycle_schedules import Problem, plan
from recycle_schedules.bounds import lower_bound

relaxed = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


@relaxed
@given(problems())
def test_the_bound_is_the_judges_or_better_and_never_above_a_plan(judge, problem):
    bounds = judge.lower_bounds(problem.to_json())
    theirs = bounds["mem_period" if problem.optimizer == "staggered" else "mem_makespan"]
    assert lower_bound(problem) >= theirs - 1e-6
    assert plan(problem).value >= lower_bound(problem) - 1e-6


def test_waiting_at_both_ends_adds_up_where_the_work_does_not_fit_between():
    problem = Problem(pipelines=2, stages=2, microbatches=4, backward="decoupled", memory_limit=[2, None], send=1.0)
    assert plan(problem).value == lower_bound(problem) == 17


def test_no_bound_is_above_the_best_known_plan():
    cases = golden()
    above = [case["name"] for case in cases if lower_bound(Problem.from_json(case["problem"])) > case["best"] + 1e-6]
    assert above == []
