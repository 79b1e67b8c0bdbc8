"""After a signal, a job finishes its step, saves a checkpoint, prints the reason and exits with 128 + the signal."""

import json
import os
import signal
import time

import pytest

pytestmark = pytest.mark.timeout(180)
SMALL = ["model=tiny", "run.validate_every=0", "numerics=reproducible"]
ENDLESS = [*SMALL, "run.steps=1000000"]


def steps(job) -> list[int]:
    return [line["step"] for line in job.run.lines(job.run.metrics)]


def saved(job) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in job.run.checkpoints.glob("step-??????"))


def summary(job) -> dict:
    return json.loads(job.run.summary.read_text())


def wait_for_step(job, step) -> None:
    deadline = time.monotonic() + 60
    while max(steps(job), default=-1) < step:
        assert time.monotonic() < deadline, job.output
        time.sleep(0.05)


SIGINT, SIGTERM, STAGGERED, SAVING = (2, 130), (15, 143), "optimizer.stagger=true", "checkpoint.every=1"


@pytest.mark.parametrize(
    ("number", "code", "more"),
    [
        pytest.param(*SIGTERM, [SAVING], marks=pytest.mark.slow),
        pytest.param(*SIGINT, [STAGGERED], marks=pytest.mark.slow),  # test_cli.py has Ctrl-C
        pytest.param(*SIGINT, [], marks=pytest.mark.slow),
        pytest.param(*SIGINT, [SAVING], marks=pytest.mark.slow),
        pytest.param(*SIGTERM, [], marks=pytest.mark.slow),
        pytest.param(*SIGTERM, [STAGGERED], marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_the_job_after_its_step_with_a_checkpoint(number, code, more, zygote):
    with zygote.run(["parallel=2x2", *ENDLESS, *more]) as job:
        wait_for_step(job, 2)
        job.signal(number)
        assert job.wait(60) == code, job.output
        newest = saved(job)[-1]
        assert newest == steps(job)[-1] + 1
        assert f"the newest checkpoint is {job.run.checkpoints}/step-{newest:06d}" in job.output.splitlines()[-1]


@pytest.mark.slow  # quick counterpart: the resumes in tests/failures/test_surroundings.py
def test_a_run_ended_by_a_signal_resumes_to_the_weights_of_an_uninterrupted_run(zygote, tmp_path):
    whole = ["parallel=2x2", *SMALL, "run.steps=30"]
    with zygote.run(whole) as job:
        assert job.wait(60) == 0, job.output
        expected = summary(job)
    folder = [f"run.dir={tmp_path / 'run'}"]
    with zygote.run([*whole, *folder]) as job:
        wait_for_step(job, 3)
        job.signal(signal.SIGTERM)
        assert job.wait(60) == 143, job.output
    with zygote.run([*whole, *folder, "run.resume=true"]) as job:
        assert job.wait(60) == 0, job.output
        assert summary(job)["weights_sha256"] == expected["weights_sha256"]
        assert steps(job) == list(range(30)), "each step has one line"


@pytest.mark.slow
def test_a_second_signal_after_two_seconds_ends_the_job_before_the_step_is_finished(zygote):
    with zygote.run(["parallel=2x2", *ENDLESS, "control.suspicion=60"]) as job:
        wait_for_step(job, 1)
        os.kill(job.workers()[3], signal.SIGSTOP)
        job.signal(signal.SIGINT)
        with pytest.raises(TimeoutError):
            job.wait(3)
        begun = time.monotonic()
        job.signal(signal.SIGINT)
        assert job.wait(30) == 130, job.output
        assert time.monotonic() - begun < 8
        assert "there is no checkpoint yet" in job.output


@pytest.mark.slow
def test_sigterm_to_one_node_after_the_other_ends_the_job_with_a_checkpoint(zygote):
    with zygote.run_nodes(["parallel=2x2", *ENDLESS], nodes=2) as job:
        wait_for_step(job, 1)
        for node in job.nodes:  # first the coordinator's node
            node.signal(signal.SIGTERM)
            time.sleep(2.0)
        assert 143 in [node.wait(60) for node in job.nodes], job.output
        assert saved(job)[-1] == steps(job)[-1] + 1, job.output


@pytest.mark.slow
def test_checkpoints_can_be_time_based(zygote):
    with zygote.run(["parallel=2x2", *ENDLESS, "checkpoint.minutes=0.02"]) as job:
        job.wait_for_event("checkpoint_saved", 60)
        first = saved(job)[-1]
        wait_for_step(job, first + 2)
        deadline = time.monotonic() + 60
        while saved(job)[-1] == first:
            assert time.monotonic() < deadline, job.output
            time.sleep(0.1)
