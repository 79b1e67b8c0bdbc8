"""Plans of large jobs in blocks: pipelines that differ in more than their deaths."""

import pytest
from recycle_schedules import Problem, Worker, plan
from recycle_schedules.validate import validate

LARGE = {"pipelines": 40, "stages": 16, "microbatches": 264}


def planned_in_blocks(**keys):
    best = plan(Problem(**LARGE, **keys))
    assert type(best).__name__ != "Plan"
    return best


@pytest.mark.parametrize(
    "memory",
    [
        {"memory_limit": {"per_worker": {"17,3": 13}, "default": 16}},
        {"memory": {"capacity": {"17,3": 13.5, "default": 16.5}, "stages": [{"flight": 1}] * 16}},
    ],
    ids=["counted", "bytes"],
)
def test_blocks_keep_the_limit_of_each_worker(memory):
    best = planned_in_blocks(**memory)
    assert [best.problem.limit(Worker(d, 3)) for d in (16, 17)] == [16, 13]
    assert validate(best) == []
