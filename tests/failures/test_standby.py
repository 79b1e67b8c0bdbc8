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
        job.wait_until(lambda: "recycle-standby" in names_of(supervisor.children()), "a standby process")
        for number in (3, 4, 5):  # processes so far; the first two are those of the start
            job.worker("0.0").kill()
            job.wait_for_event("spawned", nth=number)
            worker = job.worker("0.0")
            assert "recycle_pp.supervisor.fork_server" in worker.cmdline(), job.explain()
            assert worker.ppid() == supervisor.pid, "it dies with its supervisor"
        job.wait_for_event("rejoined")
        job.wait_until(lambda: "recycle-standby" in names_of(supervisor.children()), "the next standby process")


def names_of(processes):
    return [process.name() for process in processes]
