"""Processes under real torchrun that wake from suspension to find another coordinator or another job."""

import json
import time

import pytest

from .launched import COMMON, Launched

pytestmark = [pytest.mark.torchrun, pytest.mark.timeout(300)]
SHAPE = ("parallel.pipelines=2", "parallel.stages=2", "parallel.microbatches=3")
STEPS = 60
ARGUMENTS = (*SHAPE, f"run.steps={STEPS}", "run.validate_every=0", "run.standby=off", "checkpoint.every=20")


@pytest.fixture(scope="module")
def expected(zygote):
    """The digest of the weights of an undisturbed job."""
    with zygote.run([*COMMON, *ARGUMENTS]) as job:
        assert job.wait(200) == 0, job.output
        return json.loads(job.run.summary.read_text())["weights_sha256"]


@pytest.mark.parametrize(
    ("suspicion", "seconds"), [(2, 9), *(pytest.param(5, n, marks=pytest.mark.slow) for n in (14, 15, 20, 30))]
)
def test_a_coordinator_that_wakes_after_an_election_follows_its_successor(suspicion, seconds, expected, tmp_path):
    """The others elect a coordinator after `suspicion` + 5 s. No step is lost, and no worker except the
    suspended supervisor's."""
    arguments = [*ARGUMENTS, f"control.suspicion={suspicion}", "run.sample_log=true"]
    with Launched(tmp_path, nodes=1, workers=4, arguments=arguments) as job:
        job.wait_for_step(15)
        leader = job.supervisors([0])[0]
        leader.suspend()
        time.sleep(seconds)
        leader.resume()
        assert job.wait([0], 120) == [0], job.explain()
        assert json.loads(job.run.summary.read_text())["weights_sha256"] == expected, job.explain()
        for path in (job.run.metrics, job.run.samples):
            assert [line["step"] for line in job.run.lines(path)] == list(range(STEPS)), "each step must have one line"
        assert len(job.events("coordinator_elected")) == 1, job.explain()
        assert {event["worker"] for event in job.events("death_detected")} <= {"0.0"}, job.explain()
        assert not job.events("restored") and not job.events("stopped"), job.explain()


@pytest.mark.slow
def test_a_node_that_wakes_up_after_a_restart_of_its_job_does_not_disturb_the_new_job(expected, tmp_path):
    """The new job has the same token and the same address."""
    arguments = [*ARGUMENTS[2:], "control.suspicion=60"]
    (tmp_path / "old").mkdir()
    with Launched(tmp_path / "old", nodes=2, workers=2, arguments=arguments) as old:
        old.wait_for_step(3)
        suspended = old.processes(1)
        for process in suspended:
            process.suspend()
        old.kill(0)
        with Launched(tmp_path, nodes=2, workers=2, arguments=arguments, port=old.port) as job:
            job.wait_for_step(3)
            for process in suspended:
                process.resume()
            assert job.wait([0, 1], 120) == [0, 0], job.explain()
            assert json.loads(job.run.summary.read_text())["weights_sha256"] == expected, job.explain()
            assert not job.events("death_detected"), job.explain()
        assert old.wait([1], 60) == [1], old.explain()
        assert "another job with the same token has started" in old.output(1)
