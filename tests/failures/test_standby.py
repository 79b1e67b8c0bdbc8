"""Standby processes of launched jobs."""

import pytest

from .launched import Launched

pytestmark = pytest.mark.timeout(240)
ARGUMENTS = ("run.steps=100000", "run.validate_every=0", "checkpoint.minutes=0", "run.respawns=10", "run.standby=on")


def test_a_worker_that_dies_repeatedly_is_forked_each_time(tmp_path):
    """Even if it dies before the next standby process exists. Importing torch for each restart would take seconds."""
    with Launched(tmp_path, nodes=2, workers=1, arguments=ARGUMENTS) as job:
        job.wait_for_step(0)
        (supervisor,) = job.supervisors([0])
        job.wait_until(lambda: standby_of(supervisor), "a standby process")
        for number in (3, 4, 5):  # number of processes so far, of which the start makes two
            job.worker("0.0").kill()
            job.wait_for_event("spawned", nth=number)
            worker = job.worker("0.0")
            assert "recycle_pp.supervisor.fork_server" in worker.cmdline(), job.explain()
            assert worker.ppid() == supervisor.pid, "the worker must be a child of its supervisor, to die with it"
        job.wait_for_event("rejoined")
        job.wait_until(lambda: standby_of(supervisor), "the next standby process")


def test_a_standby_process_that_is_stopped_does_not_become_the_worker(tmp_path):
    """Otherwise its rank would have no worker for the rest of the job, because the process would never connect."""
    with Launched(tmp_path, nodes=2, workers=1, arguments=ARGUMENTS) as job:
        job.wait_for_step(0)
        (supervisor,) = job.supervisors([0])
        job.wait_until(lambda: standby_of(supervisor), "a standby process")
        (standby,) = standby_of(supervisor)
        standby.suspend()
        job.worker("0.0").kill()
        job.wait_for_event("rejoined", seconds=30)
        assert job.worker("0.0").pid != standby.pid


def standby_of(supervisor):
    return [child for child in supervisor.children() if child.name() == "recycle-standby"]
