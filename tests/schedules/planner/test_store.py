"""Plans made ahead."""

from recycle_schedules import Problem, Worker, plan
from recycle_schedules.planner.normalize import normalize
from recycle_schedules.planner.store import PlanStore
from recycle_schedules.validate import validate

WORKED = Problem(pipelines=3, stages=4, microbatches=6, memory_limit={"base": "1f1b", "extra": 2})


def test_three_deaths_at_one_stage_are_spread():
    """96 slots with 3 of 4 dead at one stage, 33 spread over stages (the paper's technique, our arithmetic)."""
    problem = Problem(pipelines=4, stages=4, microbatches=8, failed=[(0, 1), (1, 1), (2, 1)])
    best = normalize(problem, horizon=100, move_cost=10.0)
    assert best.before == 96 and best.period == 33
    assert sorted(best.deaths) == [0, 1, 1, 1]
    moved = set(problem.dead) - {to for _, to in best.moves} | {who for who, _ in best.moves}
    assert all(who in problem.workers() and to in problem.dead for who, to in best.moves)
    assert validate(plan(problem.replace(failed=sorted(moved)))) == []


def test_moves_that_cost_more_than_they_save_are_not_made():
    problem = Problem(pipelines=4, stages=4, microbatches=8, failed=[(0, 1), (1, 1), (2, 1)])
    assert normalize(problem, horizon=1, move_cost=1000.0).moves == []


def test_the_store_finds_a_plan_for_every_single_death_again_after_a_restart(tmp_path):
    PlanStore(tmp_path, WORKED).fill(failures=2)
    store = PlanStore(tmp_path, WORKED)
    for worker in WORKED.workers():
        found = store.find({worker})
        assert found.problem.dead == {worker} and validate(found) == []
    assert store.find({Worker(0, 0), Worker(1, 0)}) is None
