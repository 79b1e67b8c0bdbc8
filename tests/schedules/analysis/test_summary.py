"""A plan in a few numbers."""

from recycle_schedules import Problem, plan
from recycle_schedules.analysis.summary import summary

TWO_HOSTS = {"hosts": [["a"] * 4, ["a"] * 4, ["b"] * 4, ["b"] * 4], "between_hosts": {"latency": 10.0}}


def test_a_plan_with_links_is_compared_to_one_that_ignores_them():
    problem = Problem(pipelines=4, stages=4, microbatches=6, failed=[(0, 2)], links=TWO_HOSTS)
    over = dict(summary(plan(problem)))["against ignoring links"]
    assert float(over.split(" %")[0]) < -40
    assert "against ignoring links" not in dict(summary(plan(problem.replace(links=None))))
