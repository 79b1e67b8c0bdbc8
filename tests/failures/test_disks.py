"""A job started by torchrun whose file systems stop answering, fill up or become read-only."""

import contextlib
import json
import os
import time
from pathlib import Path

import pytest

from .disk import Disk
from .launched import Launched

pytestmark = [pytest.mark.torchrun, pytest.mark.timeout(300)]
MISSING = Disk.missing()
needs_disk = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
SHAPE = ("parallel.pipelines=2", "parallel.stages=1", "parallel.microbatches=4")
QUICK = ("control.suspicion=3", "run.validate_every=0", *SHAPE)


class SmallShm(Launched):
    """A job whose agents have a /dev/shm of 64 KiB, in a new mount namespace."""

    launcher = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$0" "$@"')


@pytest.fixture
def disk(tmp_path):
    with Disk(tmp_path) as disk:
        yield disk


@pytest.fixture(scope="module")
def expected(zygote):
    """(losses by step, digest of the weights) after `steps` undisturbed steps of one worker."""

    known = {}

    def of(steps, *arguments):
        if (steps, *arguments) not in known:
            shape = ("parallel.pipelines=1", "parallel.stages=1", "parallel.microbatches=8", "run.validate_every=0")
            common = ("model=tiny", "numerics=reproducible", *arguments)
            with zygote.run([*common, *shape, f"run.steps={steps}"]) as job:
                assert job.wait(200) == 0, job.output
                known[steps, *arguments] = losses(job.run), json.loads(job.run.summary.read_text())["weights_sha256"]
        return known[steps, *arguments]

    return of


def losses(run):
    lines = run.lines(run.metrics)
    assert [line["step"] for line in lines] == [*range(len(lines))], "each step must have one line"
    return {line["step"]: line["loss"] for line in lines}


def check_exact(job, expected):
    assert (losses(job.run), json.loads(job.run.summary.read_text())["weights_sha256"]) == expected, job.explain()


@needs_disk
@pytest.mark.parametrize("seconds", [4, pytest.param(40, marks=pytest.mark.slow)])
def test_a_run_folder_that_does_not_answer_delays_no_worker_and_no_recovery(seconds, disk, tmp_path, expected):
    """A worker dies while the disk is frozen. The others write to their logs, and a replacement is started."""
    steps = 60 * seconds  # so many that the job does not end before the disk is frozen, which may take seconds
    arguments = [*QUICK, f"run.steps={steps}", "checkpoint.every=100"]
    with Launched(tmp_path, nodes=1, workers=2, arguments=arguments, run=disk.path / "run") as job:
        job.wait_for_step(20)
        with disk.frozen():
            begun = time.monotonic()
            job.worker("1.0").kill()
            while "worker 1.0 is back" not in job.output(0):
                assert time.monotonic() < begun + 60, job.explain()
                time.sleep(0.1)
            time.sleep(max(0.0, begun + seconds - time.monotonic()))
        assert job.wait([0], 200) == [0], job.explain()
        check_exact(job, expected(steps))
        assert [e["cause"] for e in job.events("death_detected")] == ["signal"], "no worker may die because of the disk"
        assert len(job.events("rejoined")) == 1, job.explain()
        assert job.longest_gap() < 3
        assert job.events("checkpoint_saved")[-1]["checkpoint"] == steps, "the last checkpoint must be complete"


@pytest.mark.slow
@needs_disk
@pytest.mark.parametrize("back", ["before the take-over", "after the take-over"])
@pytest.mark.timeout(600)
def test_no_line_is_lost_with_the_coordinator_while_the_run_folder_does_not_answer(back, disk, tmp_path):
    steps = 120
    arguments = ["control.suspicion=3", *SHAPE, f"run.steps={steps}", "run.validate_every=7", "run.sample_log=true"]
    with Launched(tmp_path, nodes=2, workers=1, arguments=arguments, run=disk.path / "run") as job:
        job.wait_for_step(5, 200)
        with disk.frozen():
            frozen = time.time()
            time.sleep(0.5)
            shown = job.committed() + 20
            job.wait_until(lambda: f"\nstep {shown:3}" in job.output(0), f"step {shown} on the console")
            job.supervisors([0])[0].kill()
            if back == "after the take-over":
                job.wait_until(lambda: "is the new coordinator" in job.output(1), "take-over")
        assert job.wait([1], 200) == [0], job.explain()
        metrics, samples = job.metrics(), job.run.lines(job.run.samples)
        assert [line["step"] for line in metrics] == [line["step"] for line in samples] == [*range(steps)]
        assert all("val_loss" in line for line in metrics[6::7]), "every seventh step must be validated"
        assert metrics[shown - 1]["time"] > frozen and metrics[shown - 1]["term"] > 0, (
            "the new coordinator must have written this line"
        )


@needs_disk
def test_a_read_only_run_folder_is_reported_in_one_sentence_and_no_worker_starts(disk, tmp_path):
    (disk.path / "run").mkdir()
    disk.break_down()
    with Launched(tmp_path, nodes=1, workers=2, arguments=QUICK, run=disk.path / "run") as job:
        assert job.wait([0], 60) != [0]
        sentence = f"recycle_pp: run.dir={job.run.path} cannot be written: Read-only file system"
        assert job.output(0).splitlines().count(sentence) == 1, job.output(0)
        assert "exitcode  : 2" in job.output(0), job.output(0)


@pytest.mark.slow
@needs_disk
def test_a_run_folder_that_becomes_read_only_costs_no_step(disk, tmp_path):
    """The disk fails during the job. Training continues, a dead worker returns, and the exit code is 1."""
    arguments = [*QUICK, "run.steps=120", "checkpoint.every=40"]
    with Launched(tmp_path, nodes=1, workers=2, arguments=arguments, run=disk.path / "run") as job:
        job.wait_for_event("checkpoint_saved")
        disk.break_down()
        job.worker("1.0").kill()
        assert job.wait([0], 200) == [1], job.explain()
        assert "worker 1.0 is back" in job.output(0), job.output(0)
        assert f"{job.run.path / 'events.jsonl'} cannot be written: Read-only file system" in job.output(0)
        assert "checkpoint step-000120 was not saved" in job.output(0), job.output(0)
        assert "; the newest is step-000040, saved" in job.output(0), job.output(0)


@pytest.mark.slow
@needs_disk
def test_a_full_dev_shm_does_not_affect_a_job(tmp_path, expected):
    """/dev/shm fills up in the middle of the job, and is full when a worker restarts."""
    arguments = [*QUICK, "run.steps=120"]
    with SmallShm(tmp_path, nodes=1, workers=2, arguments=arguments) as job:
        job.wait_for_step(20)
        shm = Path(f"/proc/{job.worker('0.0').pid}/root/dev/shm")
        assert os.statvfs(shm).f_blocks * os.statvfs(shm).f_frsize == 64 << 10, "the job must have its own /dev/shm"
        with (shm / "ballast").open("wb", buffering=0) as ballast, contextlib.suppress(OSError):
            while True:
                ballast.write(bytes(4096))
        job.worker("1.0").kill()
        assert job.wait([0], 200) == [0], job.explain()
        check_exact(job, expected(120))
        assert len(job.events("rejoined")) == 1, job.explain()
