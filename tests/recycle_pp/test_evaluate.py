"""Epochs, the whole held-out data, the best checkpoint and run.evaluate, in one real job."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from recycle_pp import evaluate
from recycle_pp.config.checks import validate
from recycle_pp.config.compose import compose
from recycle_pp.data.batches import Batches
from recycle_pp.telemetry.best_checkpoint import best
from recycle_pp.telemetry.checkpoint_folders import finished

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def job(zygote, tmp_path_factory):
    """(settings, run folder, output) of a job that trains on another text, so that its validation loss rises again."""
    folder = tmp_path_factory.mktemp("epochs")
    (folder / "train").write_bytes(b"abcd" * 600)
    (folder / "held").write_bytes(b"ab" * 150 + b"dcba" * 40)
    arguments = [
        "model=tiny", "model.sequence=16", f"data.path={folder / 'train'}", f"data.validation_path={folder / 'held'}",
        "parallel=2x2", "parallel.microbatches=2", "run.epochs=1.5", "run.validate_every=4", "checkpoint.every=4",
        "run.validate_samples=all", "checkpoint.keep=1", "checkpoint.keep_best=true", "optimizer.lr=3e-2",
        "optimizer.warmup=0", "numerics=reproducible", "+fail_at=5:1.0",
        'run.evaluate="ls $1; echo evaluated"',
    ]  # fmt: skip
    with zygote.run(arguments) as running:
        assert running.wait(250) == 0, running.output
        yield compose(arguments), running.run, running.output


def test_epochs_give_the_number_of_steps(job):
    settings, run, output = job
    windows = Batches(settings).windows
    assert windows == 149 and f"run.epochs=1.5 of {windows} samples gives run.steps=28" in output
    assert [line["step"] for line in run.lines(run.metrics)] == list(range(28))
    assert run.read_settings().run.steps == 28


def test_a_validation_uses_every_whole_micro_batch_of_the_held_out_data(job):
    settings, run, _ = job
    samples = {line["val_samples"] for line in run.lines(run.metrics) if "val_loss" in line}
    assert samples == {Batches(settings).validations * 2} == {28}


def test_the_best_checkpoint_is_kept_in_addition_to_the_newest(job):
    """The best of those saved. A busy machine skips a checkpoint while the previous one is being written."""
    _, run, _ = job
    saved = {event["checkpoint"] for event in run.lines(run.events) if event["event"] == "checkpoint_saved"}
    held_out = {line["step"] + 1: line["val_loss"] for line in run.lines(run.metrics) if "val_loss" in line}
    lowest = min(held_out.keys() & saved, key=held_out.__getitem__)
    assert lowest < 28, "if the newest checkpoint were the best, this test could not fail"
    assert set(finished(run.checkpoints)) == {lowest, 28} and best(run.metrics, finished(run.checkpoints)) == lowest


def test_the_last_checkpoint_is_evaluated(job):
    _, run, _ = job
    log = run.path / "evaluations" / "step-000028.log"
    text = log.read_text()
    assert "config.json" in text and "model.safetensors" in text and text.endswith("evaluated\n")
    left = [path.name for path in log.parent.iterdir() if not path.name.endswith((".log", ".log.partial"))]
    assert not left, "the exported folders are removed"
    assert evaluate.main([str(run.path), "--step", "28"]) == 0 and log.read_text() == text


def test_a_failing_command_gives_exit_code_1_and_its_output_is_kept(job, tmp_path):
    _, run, _ = job
    copy = tmp_path / "run"
    subprocess.run(["cp", "-r", str(run.path), str(copy)], check=True)
    text = copy.joinpath("config.yaml").read_text()
    copy.joinpath("config.yaml").write_text(text.replace("echo evaluated", "exit 3"))
    (copy / "evaluations" / "step-000028.log").unlink()
    command = [sys.executable, "-m", "recycle_pp.evaluate", str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ}, check=False)
    assert done.returncode == 1 and "step-000028 could not be evaluated (exit code 3); see" in done.stderr
    assert "model.safetensors" in (copy / "evaluations" / "step-000028.log.partial").read_text()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_a_signal_ends_the_final_evaluation_and_leaves_no_process(number, code, zygote, tmp_path):
    started = tmp_path / "pid"
    endless = f'run.evaluate="echo $$ > {started}; sleep 600"'
    with zygote.run(["model=tiny", "parallel=1x1", "run.steps=1", "run.validate_every=0", endless]) as job:
        deadline = time.monotonic() + 60
        while not started.exists() or not started.read_text():
            assert time.monotonic() < deadline, job.output
            time.sleep(0.05)
        command = psutil.Process(int(started.read_text()))
        job.signal(number)
        assert job.wait(60) == code, job.output
        assert "the training is done, but run.evaluate for its last checkpoint was ended by" in job.output
    command.wait(10)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["run.epochs=0"], "run.epochs must be above 0"),
        (["run.validate_samples=some"], "run.validate_samples must be all or a whole number of at least 1, not some"),
        (["run.validate_samples=0"], "run.validate_samples must be all or a whole number of at least 1, not 0"),
        (["checkpoint.keep_best=true", "run.validate_every=0"], "checkpoint.keep_best needs run.validate_every"),
        (["run.evaluate=ls", "emulate=sleep"], "run.evaluate needs real compute: it must be null"),
    ],
)
def test_a_mistake_is_reported_in_one_sentence(words, sentence):
    with pytest.raises(ValueError, match=sentence):
        validate(compose(words))


def test_a_run_without_a_command_or_a_checkpoint_is_refused(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text(json.dumps({"run": {"evaluate": None}}))
    assert evaluate.main([str(tmp_path)]) == 2
    assert "run.evaluate is not set in" in capsys.readouterr().err
    (tmp_path / "config.yaml").write_text(json.dumps({"run": {"evaluate": "true"}}))
    for step in ([], ["--step", "20"]):
        assert evaluate.main([str(tmp_path), *step]) == 2
        assert capsys.readouterr().err == f"error: {tmp_path} has no checkpoint\n"


@pytest.mark.parametrize("step", [0, -1, 999])
def test_a_step_without_a_checkpoint_is_refused_with_the_steps_that_have_one(step, tmp_path, capsys):
    (tmp_path / "config.yaml").write_text(json.dumps({"run": {"evaluate": "true"}}))
    for saved in (20, 28):
        (tmp_path / "checkpoints" / f"step-{saved:06d}").mkdir(parents=True)
    assert evaluate.main([str(tmp_path), "--step", str(step)]) == 2
    words = f"error: --step must be one of 20, 28, the checkpoints in {tmp_path}, not {step}\n"
    assert capsys.readouterr().err == words and not (tmp_path / "evaluations").exists()
