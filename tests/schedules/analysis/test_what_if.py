"""The cost of each possible next death."""

from recycle_schedules import Problem, Worker
from recycle_schedules.analysis.what_if import what_if

WORKED = Problem(pipelines=3, stages=4, microbatches=6, memory_limit={"base": "1f1b", "extra": 2})


def test_what_if_has_a_row_for_every_worker_and_names_the_thinnest_stage():
    table = what_if(WORKED.replace(failed=[(0, 2)]))
    assert [row.worker for row in table.rows] == WORKED.replace(failed=[(0, 2)]).workers()
    assert (table.thinnest, table.left) == (2, 2)
    hurt = {row.worker: row.period for row in table.rows}
    assert hurt[Worker(1, 2)] > hurt[Worker(1, 1)] >= table.now.value
    for row in table.rows:
        assert row.peak <= row.limit and row.peer.stage == row.worker.stage


def test_the_death_of_a_worker_without_a_near_peer_costs_more():
    """W(2, 1) has no peer on its own host; the other workers have one."""
    links = {"hosts": [["a", "a"], ["a", "a"], ["b", "b"]], "between_hosts": {"latency": 5}}
    table = what_if(Problem(pipelines=3, stages=2, microbatches=4, links=links))
    hurt = {row.worker: row.period for row in table.rows}
    assert hurt[Worker(2, 1)] > hurt[Worker(0, 1)]


def test_what_if_has_no_period_if_the_stage_would_have_no_live_worker():
    table = what_if(Problem(pipelines=2, stages=2, microbatches=2, failed=[(0, 1)]))
    gone = [row for row in table.rows if row.period is None]
    assert [row.worker for row in gone] == [Worker(1, 1)] and not gone[0].fits


def test_what_if_has_no_period_if_the_other_workers_have_no_room():
    """After the death of a worker of stage 0, the other one would keep the boundary tensors of all 8 micro-batches."""
    stages = [{"weights": 2, "flight": 3, "boundary": 1.5}, {"weights": 1, "flight": 1}]
    table = what_if(Problem(pipelines=2, stages=2, microbatches=4, memory={"capacity": 14, "stages": stages}))
    assert {row.worker: row.fits for row in table.rows} == {
        Worker(0, 0): False, Worker(0, 1): True, Worker(1, 0): False, Worker(1, 1): True,
    }  # fmt: skip
    assert [row.worker.stage for row in table.rows if row.period is None] == [0, 0]


def test_what_if_plans_keep_the_capacity():
    table = what_if(WORKED, microbatch_bytes=1e9, capacity=4e9)
    assert all(row.peak <= 4 and row.bytes <= 4e9 for row in table.rows)
