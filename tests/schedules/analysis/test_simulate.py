"""Plans simulated with durations other than the planned ones."""

from recycle_schedules import Problem, plan
from recycle_schedules.analysis.simulate import simulate

WORKED = Problem(pipelines=3, stages=4, microbatches=6, memory_limit={"base": "1f1b", "extra": 2})


def test_a_plan_simulated_with_its_own_times_is_unchanged():
    best = plan(WORKED.replace(failed=[(1, 2)], optimizer="barrier"))
    assert simulate(best).makespan == best.makespan
    assert simulate(best, durations={"F": 2, "I": 2, "W": 2}).makespan == 2 * best.makespan
    assert simulate(best, send=0.5).makespan > best.makespan
