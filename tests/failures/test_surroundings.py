"""Failures around a job: full or broken disks, damaged checkpoints, lost stages, and resumes with another shape."""

import contextlib
import json
import signal
import subprocess
from dataclasses import replace

import pytest

from .harness import Case, SignalAt, explain, fails, rejoins

SAVING = ("checkpoint.every=2",)


def interrupted(runs, folder, shape="2x2", steps=60, event="checkpoint_saved", nth=2, **options):
    """Runs a job in `folder` that SIGTERM ends after the `nth` event, by default the second checkpoint."""
    stop = SignalAt(event, "0.0", nth=nth, number=signal.SIGTERM, launcher=True)
    overrides = (*SAVING, f"run.dir={folder}", *options.pop("overrides", ()))
    case = Case(
        "is ended by SIGTERM", shape, overrides, (stop,), steps=steps, ends="stopped: SIGTERM", deaths=None, **options
    )
    return runs.of(case, "resumes")


def resumed(shape, folder, steps=60, overrides=()):
    common = (*SAVING, f"run.dir={folder}", "run.resume=true", *overrides)
    return Case("continues", shape, common, steps=steps, deaths=0)


def check_same_weights(runs, outcome, as_in):
    expected = runs.fault_free(as_in)
    assert outcome.summary["weights_sha256"] == expected.summary["weights_sha256"], explain(outcome)
    assert expected.losses.items() >= outcome.losses.items() and outcome.losses, explain(outcome)


SAME_BATCH = {  # D * M is 8
    "2x2": (),
    "4x1": ("parallel.pipelines=4", "parallel.stages=1", "parallel.microbatches=2"),
    "1x4": ("parallel.pipelines=1", "parallel.stages=4", "parallel.microbatches=8"),
}


@pytest.mark.slow  # quick counterpart: the test with a flipped bit also resumes with another shape
@pytest.mark.parametrize("shape", ["4x1", "2x2", "1x4"])
def test_a_resume_with_any_shape_ends_with_the_weights_of_an_uninterrupted_run(shape, runs, tmp_path):
    interrupted(runs, tmp_path / "run")
    case = resumed("2x2", tmp_path / "run", overrides=SAME_BATCH[shape])
    outcome = runs.of(case, "resumes")
    assert min(outcome.losses) == 0 and max(outcome.losses) == 59
    check_same_weights(runs, outcome, as_in=Case("", "2x2", steps=60))


@pytest.mark.slow  # quick counterpart: the joining workers' loads in tests/recycle_pp/coordinator/test_workers.py
def test_a_worker_returns_after_the_checkpoint_of_the_resume_was_deleted(runs, tmp_path):
    """Only the two newest checkpoints are kept. The returning worker receives its state from a peer instead."""
    interrupted(runs, tmp_path / "run")
    case = resumed("2x2", tmp_path / "run", overrides=(*fails("40:1.1"), *rejoins("44:1.1")))
    outcome = runs.of(replace(case, deaths=1), "resumes")
    check_same_weights(runs, outcome, as_in=Case("", "2x2", steps=60))
    assert [e["worker"] for e in outcome.all("rejoined")] == ["1.1"], explain(outcome)
    assert not outcome.all("refused"), explain(outcome)


@pytest.mark.slow
def test_a_resume_skips_a_damaged_checkpoint_and_reports_it(runs, tmp_path):
    interrupted(runs, tmp_path / "run")
    newest = max((tmp_path / "run" / "checkpoints").glob("step-??????"))
    part = next(newest.glob("stage-1-*/*.distcp"))
    part.write_bytes(part.read_bytes()[:-100])
    outcome = runs.of(resumed("2x2", tmp_path / "run"), "resumes")
    check_same_weights(runs, outcome, as_in=Case("", "2x2", steps=60))
    (damaged,) = outcome.all("checkpoint_damaged")
    assert f"step-{damaged['checkpoint']:06d}" == newest.name
    assert "is damaged or cannot be read, and is skipped" in outcome.output


@pytest.mark.slow  # quick counterpart: the flipped bit in tests/recycle_pp/state/test_checkpoint.py
def test_a_resume_with_another_shape_detects_a_single_flipped_bit(runs, tmp_path):
    interrupted(runs, tmp_path / "run")
    newest = max((tmp_path / "run" / "checkpoints").glob("step-??????"))
    part = max(newest.glob("stage-*/*.distcp"), key=lambda path: path.stat().st_size)
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    outcome = runs.of(resumed("2x2", tmp_path / "run", overrides=SAME_BATCH["4x1"]), "resumes")
    check_same_weights(runs, outcome, as_in=Case("", "2x2", steps=60))
    (damaged,) = outcome.all("checkpoint_damaged")
    assert "has a wrong checksum" in damaged["detail"]


@pytest.mark.slow
def test_a_resume_with_only_damaged_checkpoints_stops(runs, tmp_path):
    interrupted(runs, tmp_path / "run")
    for metadata in (tmp_path / "run" / "checkpoints").glob("*/.metadata"):
        metadata.unlink()
    runs.of(replace(resumed("2x2", tmp_path / "run"), ends="are damaged"), "resumes")


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_written_costs_no_step(runs, tmp_path):
    """Every write below checkpoints/ fails, as on a full disk. It is a link to /proc, where not even root can write."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoints").symlink_to("/proc")
    case = Case("has no room for checkpoints", "2x2", (*SAVING, f"run.dir={run}"), ends="was not saved", deaths=0)
    outcome = runs.of(case, "resumes")
    check_same_weights(runs, outcome, as_in=Case("", "2x2"))
    assert outcome.code == 1, "the exit code must show that the last checkpoint is missing"


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 300 KB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root may mount a file system")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.slow
def test_a_full_disk_costs_no_step(small_disk, runs):
    """Events, metrics, traces, checkpoints and the summary may be lost, but training must continue."""

    def fill(job):
        job.wait_for_event("started", 60)
        with (small_disk / "ballast").open("wb", buffering=0) as ballast, contextlib.suppress(OSError):
            while True:
                ballast.write(bytes(512))

    faults = (*fails("16:0.1@backward"), "checkpoint.every=8")
    overrides = (*faults, f"run.dir={small_disk / 'run'}")
    case = Case("the disk is full", "2x2", overrides, steps=24, ends="was not saved", deaths=None, bound=200)
    outcome = runs.of(case, "a full disk", meanwhile=fill)
    assert "the job continues without it" in outcome.output and "Traceback" not in outcome.output
    assert "step 23" in outcome.output, "every step must be completed"
    assert outcome.code == 1, "the exit code must show that the last checkpoint is missing"


LAST_PEER = fails("5:0.1@backward", "7:1.1@forward")


def test_a_stage_that_loses_its_last_worker_restarts_from_the_checkpoint(runs):
    signals = (SignalAt("checkpoint_saved", "0.1"), SignalAt("resumed", "1.1"))
    case = Case("loses a stage", "2x2", (*SAVING, "run.respawns=0"), signals, steps=40, deaths=2)
    outcome = runs.of(case, "a stage lost")
    assert outcome.all("stage_lost") and outcome.all("restored"), explain(outcome)
    check_same_weights(runs, outcome, as_in=Case("", "2x2", steps=40))
    assert [line["step"] for line in outcome.metrics] == [*range(40)] == [*outcome.samples], explain(outcome)


def test_a_stage_that_loses_its_last_worker_before_the_first_checkpoint_restarts_from_step_0(runs):
    case = Case("loses a stage", "2x2", (*LAST_PEER, "run.respawns=0"), steps=10, deaths=2)
    outcome = runs.of(case, "a stage lost")
    assert "all workers restart from step 0" in outcome.output
    runs.check_exact(outcome)


def test_a_stage_can_be_lost_again_and_again_before_the_first_checkpoint(runs):
    """With one pipeline, each death is the loss of a stage."""
    again = [SignalAt("restored", worker, nth=1 + number, after=1.5) for number, worker in enumerate(("0.0", "0.1"))]
    case = Case("loses stages", "1x2", (), (SignalAt("started", "0.1", after=0.3), *again), steps=100, deaths=3)
    outcome = runs.of(case, "a stage lost")
    assert [e["checkpoint"] for e in outcome.all("restored")] == [0, 0, 0], explain(outcome)
    runs.check_exact(outcome)


@pytest.mark.slow
def test_fewer_workers_than_stages_stop_the_job_with_the_reason(runs):
    signals = tuple(SignalAt("checkpoint_saved", worker) for worker in ("0.1", "1.1", "1.0"))
    said = "1 live worker cannot run 2 stages"
    overrides = (*SAVING, "run.respawns=0")
    case = Case("loses too many", "2x2", overrides, signals, steps=400, deaths=None, ends=said)
    runs.of(case, "a stage lost")


@pytest.mark.slow  # quick counterpart: the read-only folder in test_disks.py
@pytest.mark.parametrize("below", ["file", "/proc"])  # not even root can create a folder there
def test_a_run_folder_that_cannot_be_created_is_reported_before_a_worker_starts(below, zygote, tmp_path):
    (tmp_path / "file").write_text("")
    with zygote.run(["parallel=2x2", "model=tiny", f"run.dir={tmp_path / below / 'run'}"]) as job:
        assert job.wait(30) == 2
        assert "Traceback" not in job.output
        assert "run.dir" in job.output or str(tmp_path / "file") in job.output


@pytest.mark.slow
def test_every_line_of_the_logs_is_complete_after_sigterm(runs, tmp_path):
    outcome = interrupted(runs, tmp_path / "run")
    for name in ("events", "metrics"):
        lines = (tmp_path / "run" / f"{name}.jsonl").read_text().splitlines()
        assert all(isinstance(json.loads(line), dict) for line in lines) and lines
    assert outcome.code == 143
