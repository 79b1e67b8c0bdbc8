"""Standby processes of launched jobs."""

import pytest

from .launched import Launched

pytestmark = pytest.mark.timeout(240)
ARGUMENTS = ("run.steps=100000", "run.validate_every=0", "checkpoint.minutes=0", "run.respawns=10", "run.standby=on")


def test_a_worker_that_dies_again_and_again_is_forked_each_time(tmp_path):
    """Also when it dies before the next standby process exists. An import of torch would take seconds."""
    with Launched(tmp_path, nodes=2, workers=1, arguments=ARGUMENTS) as job:
        job.wait_for_step(0)
        (supervisor,) = job.supervisors([0])
        job.wait_until(lambda: standby_of(supervisor), "a standby process")
        for number in (3, 4, 5):  # processes so far; the first two are those of the start
            job.worker("0.0").kill()
            job.wait_for_event("spawned", nth=number)
            worker = job.worker("0.0")
            assert "recycle_pp.supervisor.fork_server" in worker.cmdline(), job.explain()
            assert worker.ppid() == supervisor.pid, "it dies with its supervisor"
        job.wait_for_event("rejoined")
        job.wait_until(lambda: standby_of(supervisor), "the next standby process")


def test_a_standby_process_that_is_stopped_does_not_become_the_worker(tmp_path):
    """It would never connect, and its rank would have no worker for the rest of the job."""
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
