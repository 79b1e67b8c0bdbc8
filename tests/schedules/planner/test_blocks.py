"""Plans of large jobs, made in blocks, for pipelines that differ not only in their deaths."""

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


def with_links(within, across):
    """The links of a job whose messages take 1 ms within a host and 150 ms between hosts.

    within  number of pipelines that each run on one host; they have the lowest numbers
    across  number of pipelines with a host for each stage
    """
    hosts = [[f"host {d}"] * 16 for d in range(within)]
    hosts += [[f"host {d}, stage {s}" for s in range(16)] for d in range(within, within + across)]
    return {"hosts": hosts, "within_host": {"latency": 0.001}, "between_hosts": {"latency": 0.15}}


@pytest.mark.parametrize("reverse", [False, True])
def test_pipelines_with_fast_links_do_not_slow_down_a_job_with_slow_links(reverse):
    times = {"F": 0.03, "I": 0.03, "W": 0.03, "O": 0.01}
    links = with_links(20, 20)
    best = planned_in_blocks(links=links | {"hosts": links["hosts"][:: -1 if reverse else 1]}, durations=times)
    assert validate(best) == []
    assert best.value <= planned_in_blocks(links=with_links(0, 40), durations=times).value + 1e-6
