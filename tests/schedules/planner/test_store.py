"""Plans prepared for the next deaths."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_problems import problems
from recycle_schedules import Problem, Worker, actions, plan
from recycle_schedules.planner import store as store_module
from recycle_schedules.planner.store import PlanStore, canonical
from recycle_schedules.validate import validate

WORKED = Problem(pipelines=3, stages=4, microbatches=6, memory_limit={"base": "1f1b", "extra": 2})


class Counting:
    """The planner. Counts its calls."""

    def __init__(self):
        self.asked = 0

    def __call__(self, problem):
        self.asked += 1
        return plan(problem)


def filled(problem, **keys):
    planner = Counting()
    store = PlanStore(planner=planner, **keys)
    for after in store.ahead(problem):
        store.plan(after)
    return store, planner


def test_with_equal_pipelines_one_plan_per_stage_covers_every_single_death():
    store, planner = filled(WORKED)
    assert planner.asked == len(store) == WORKED.stages
    for worker in WORKED.workers():
        after = WORKED.replace(failed=[worker])
        found = store.plan(after)
        assert found.plan.problem == after and validate(found.plan) == []
        assert found.plan.value == plan(after).value
    assert planner.asked == WORKED.stages


@settings(deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))
@given(problems(), st.data())
def test_the_store_returns_a_valid_plan_of_the_problem_and_its_action_lists(problem, data):
    """Even if the store contains a plan for the same deaths in different pipelines."""
    store = PlanStore(forwards=1)
    order = data.draw(st.permutations(range(problem.pipelines)))
    store.plan(problem.replace(failed=[(order[w.pipeline], w.stage) for w in problem.dead], memory_limit=None))
    store.plan(canonical(problem)[0])
    found = store.plan(problem)
    assert found.plan.problem == problem and validate(found.plan) == []
    assert dict(found.actions) == dict(actions(found.plan))
    assert dict(found.validation) == dict(actions(found.plan, forwards=1))


def test_workers_that_differ_are_planned_separately():
    _, planner = filled(WORKED.replace(speed={"0,1": 0.5}))
    assert planner.asked == 12


def test_the_death_of_a_host_with_all_its_workers_is_planned():
    hosts = [["a"] * 4, ["b"] * 4, ["b"] * 4]
    store, planner = filled(WORKED.replace(links={"hosts": hosts}))
    asked = planner.asked
    store.plan(WORKED.replace(links={"hosts": hosts}, failed=[(1, s) for s in range(4)] + [(2, s) for s in range(4)]))
    assert planner.asked == asked == 12 + 2


def test_deaths_that_leave_a_stage_without_a_worker_are_not_planned():
    _, planner = filled(Problem(pipelines=2, stages=2, microbatches=2, failed=[(0, 1)]))
    assert planner.asked == 2, "only the deaths of W(0, 0) and W(1, 0), because W(1, 1) has no live peer"


def test_the_store_does_not_exceed_its_byte_limit():
    one = PlanStore().plan(WORKED).size
    store, planner = filled(WORKED, most_bytes=int(2.5 * one))
    assert planner.asked == len(store) == 2, "preparation must stop before it evicts its own plans"
    store.plan(WORKED.replace(failed=[(0, 3)]))
    assert len(store) == 2


def test_the_next_deaths_of_this_membership_evict_those_of_the_previous_one():
    one = PlanStore().plan(WORKED).size
    store, planner = filled(WORKED, most_bytes=int(4.5 * one))
    now = WORKED.replace(failed=[(0, 3)])
    store.plan(now)
    asked = planner.asked
    for after in store.ahead(now):
        store.plan(after)
    assert planner.asked == asked + 3 and len(store) == 4
    store.plan(now)
    assert planner.asked == asked + 3, "the current plan must be kept"
    assert not list(store.ahead(now)), "stored plans must not be planned again"


def test_the_number_of_plans_is_limited_for_any_number_of_memberships(monkeypatch):
    monkeypatch.setattr(store_module, "MOST_PLANS", 6)
    store, planner = filled(WORKED)
    for slow in range(2, 12):
        store.plan(WORKED.replace(durations={"F": slow}))
    assert (len(store), planner.asked) == (6, 14)
    for after in store.ahead(WORKED.replace(durations={"F": 20})):
        store.plan(after)
    assert (len(store), planner.asked) == (6, 18)


def test_problems_after_possible_deaths_are_built_only_when_they_are_asked_for(monkeypatch):
    problem = Problem(pipelines=32, stages=8, microbatches=2, speed={"1,2": 0.6})
    built, check = [], Problem.__post_init__
    monkeypatch.setattr(Problem, "__post_init__", lambda self: built.append(self) or check(self))
    assert len(next(PlanStore().ahead(problem)).dead) == 1
    assert len(built) == 1


def test_changed_durations_make_a_different_problem():
    store, planner = filled(WORKED)
    store.plan(WORKED.replace(failed=[(1, 2)], durations={"F": 2}))
    assert planner.asked == 5


def test_remainders_are_planned_but_not_stored():
    store = PlanStore()
    assert store.plan(WORKED.replace(failed=[Worker(1, 2)], done=[])).plan.period is None
    assert len(store) == 0


@pytest.mark.parametrize("failed", [[(1, 2)], [(0, 1), (2, 0)]])
def test_the_canonical_problem_only_renames_pipelines(failed):
    problem, names = canonical(WORKED.replace(failed=failed))
    assert sorted((names[w.pipeline], w.stage) for w in problem.dead) == failed
