"""Training data on a file system that stops answering, and data files that change while the job reads them."""

import json
import os
import signal
import time

import numpy as np
import pytest

from recycle_pp.telemetry.status import StatusReader

from .file_server import FileServer
from .launched import Launched

pytestmark = [pytest.mark.torchrun, pytest.mark.timeout(300)]
MISSING = FileServer.missing()
needs_server = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
SHAPE = ("parallel.pipelines=2", "parallel.stages=1", "parallel.microbatches=4", "run.validate_every=0")
STEPS = 200
TOKENS = 40_000_000  # so many that the page cache contains only a part after the start


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(0).integers(0, 256, TOKENS, dtype=np.uint16)


@pytest.fixture
def server(tmp_path, tokens):
    (tmp_path / "source").mkdir()
    tokens.tofile(tmp_path / "source" / "train.bin")
    with FileServer(tmp_path / "source", tmp_path / "data") as server:
        yield server


@pytest.fixture(scope="module")
def expected(zygote, tokens, tmp_path_factory):
    """(losses by step, digest of the weights) after STEPS undisturbed steps of one worker."""
    path = tmp_path_factory.mktemp("data") / "train.bin"
    tokens.tofile(path)
    shape = ("parallel.pipelines=1", "parallel.stages=1", "parallel.microbatches=8", "run.validate_every=0")
    common = ("model=tiny", "numerics=reproducible", f"data.path={path}")
    with zygote.run([*common, *shape, f"run.steps={STEPS}"]) as job:
        assert job.wait(200) == 0, job.output
        return results(job.run)


def results(run):
    losses = {line["step"]: line["loss"] for line in run.lines(run.metrics)}
    return losses, json.loads(run.summary.read_text())["weights_sha256"]


def launched(folder, path, steps, *arguments):
    arguments = [*SHAPE, "control.suspicion=3", f"run.steps={steps}", f"data.path={path}", *arguments]
    return Launched(folder, nodes=1, workers=2, arguments=arguments)


@pytest.mark.slow  # quick counterpart: tests/recycle_pp/coordinator/test_hang_detector.py
@needs_server
@pytest.mark.parametrize("seconds", [13, 43])  # long enough that the job runs out of data that it has already read
def test_a_job_waits_for_training_data_until_the_disk_answers(seconds, server, tmp_path, expected):
    with launched(tmp_path, server.path / "train.bin", STEPS) as job:
        job.wait_for_step(20)
        with server.silent():
            time.sleep(seconds)
            silent = job.committed()
            status = StatusReader(job.run).read()
        assert job.wait([0], 120) == [0], job.explain()
        assert results(job.run) == expected, job.explain()
        assert not job.events("death_detected") and not job.events("hang_suspected"), job.explain()
        assert silent < STEPS - 1, "the job did not need the disk"
        waits = job.events("waits_for_data")
        assert len(waits) == seconds // 10, job.explain()
        assert waits[0]["path"] == str(server.path / "train.bin") and waits[0]["waiting"]
        assert all(abs(event["seconds"] - 10 * (n + 1)) < 2 for n, event in enumerate(waits))
        assert "train.bin has not answered for 10 s; worker" in job.output(0)
        assert status.state == "running" and f"the disk of {server.path / 'train.bin'}" in str(status.waits), status


@pytest.mark.slow
@needs_server
def test_sigterm_ends_a_job_that_waits_for_its_training_data(server, tmp_path):
    with launched(tmp_path, server.path / "train.bin", 100_000) as job:
        job.wait_for_step(20)
        with server.silent():
            time.sleep(5)
            job.agents[0].send_signal(signal.SIGTERM)
            job.wait([0], 40)
        assert "SIGTERM" in job.events("stopped")[-1]["reason"], job.explain()
        assert not job.events("hang_suspected"), job.explain()


def replaced(path, tokens):
    new = path.with_suffix(".new")
    tokens.tofile(new)
    new.replace(path)


def overwritten(path, tokens):
    with path.open("r+b") as file:
        tokens.tofile(file)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda path, tokens: os.truncate(path, 1000), "was truncated from 400000 to 1000 bytes while the job read it"),
        pytest.param(
            lambda path, tokens: overwritten(path, tokens[::-1]),
            "was overwritten while the job read it",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_data_file_that_changes_ends_the_job_with_one_sentence(change, sentence, zygote, tokens, tmp_path):
    path = tmp_path / "train.bin"
    tokens[:200_000].tofile(path)
    with zygote.run(["model=tiny", *SHAPE, f"data.path={path}", "run.steps=100000"]) as job:
        job.wait_for_event("started", 60)
        change(path, tokens[:200_000])
        assert job.wait(60) == 2, job.output
        (stopped,) = [e for e in job.run.lines(job.run.events) if e["event"] == "stopped"]
        assert stopped["reason"].startswith(f"{path} {sentence}"), stopped
        assert not [e for e in job.run.lines(job.run.events) if e["event"] == "death_detected"], job.output


@pytest.mark.slow
def test_a_replaced_data_file_changes_nothing_and_a_returning_worker_that_reads_it_is_rejected(
    zygote, tokens, tmp_path
):
    path = tmp_path / "train.bin"
    tokens[:200_000].tofile(path)
    common = ("model=tiny", "numerics=reproducible", "run.validate_every=0", "run.standby=off", f"data.path={path}")
    with zygote.run(
        [*common, "parallel.pipelines=1", "parallel.stages=1", "parallel.microbatches=8", "run.steps=150"]
    ) as job:
        assert job.wait(200) == 0, job.output
        expected = results(job.run)
    with zygote.run([*common, *SHAPE, "run.steps=150"]) as job:
        job.wait_for_event("started", 60)
        path.touch()
        replaced(path, tokens[200_000:400_000])
        (pid,) = [e["pid"] for e in job.run.lines(job.run.events) if e["event"] == "spawned" and e["worker"] == "1.0"]
        os.kill(pid, signal.SIGKILL)
        refused = job.wait_for_event("refused", 60)
        assert job.wait(200) == 0, job.output
        assert results(job.run) == expected, job.output
    assert refused["worker"] == "1.0" and refused["detail"].startswith("data.path has changed on"), refused


@pytest.mark.slow
@needs_server
def test_a_worker_is_reported_as_hung_if_only_its_disk_is_silent(server, tmp_path, expected):
    with launched(tmp_path, server.path / "train.bin", STEPS) as job:
        job.wait_for_step(20)
        with server.silent_for(job.worker("1.0").pid):
            job.wait_for_event("hang_suspected", seconds=30)
        assert job.wait([0], 120) == [0], job.explain()
        assert results(job.run) == expected, job.explain()
        (stuck,) = job.events("hang_suspected")
        assert stuck["worker"] == "1.0" and stuck["where"].startswith("reading the data"), stuck
        assert not job.events("waits_for_data"), job.explain()
