"""Jobs whose checkpoints go to an S3 server in its own process (`checkpoint.store`)."""

import json
import os
import shutil
import signal
import time

import pytest

from recycle_pp.telemetry.run_folder import RunFolder
from tests.s3_server import Proxy, S3Server

from .launched import Launched

SHAPE = ("parallel.pipelines=2", "parallel.stages=2")
JOB = ("model=tiny", "numerics=reproducible", "run.validate_every=0", "checkpoint.every=4", "run.steps=24")


@pytest.fixture(scope="module")
def server():
    with S3Server() as server:
        server.url("bucket")
        yield server


@pytest.fixture
def proxy(server):
    with Proxy(server) as proxy:
        yield proxy


@pytest.fixture
def environment(server, proxy, monkeypatch):
    """The variables with which users name their store, here with the proxy. Also set in this process."""
    variables = server.environment(proxy.port)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return variables


@pytest.fixture(scope="module")
def weights(zygote):
    """SHA-256 of the final weights of a job without a store and without faults."""
    with zygote.run([*SHAPE, *JOB]) as job:
        assert job.wait(200) == 0, job.output
        return json.loads(job.run.summary.read_text())["weights_sha256"]


def url():
    return f"s3://bucket/{os.urandom(4).hex()}"


def events(job, *names):
    return [event for event in job.run.lines(job.run.events) if event["event"] in names]


def stored(job):
    return [event["checkpoint"] for event in events(job, "checkpoint_stored")]


def resumed(zygote, environment, folder, expected, *overrides):
    """Resumes the run of the folder. Checks its final weights. Returns the first step that it ran."""
    with zygote.run([*SHAPE, *JOB, f"run.dir={folder}", "run.resume=true", *overrides], environment) as job:
        assert job.wait(200) == 0, job.output
        assert json.loads(job.run.summary.read_text())["weights_sha256"] == expected, job.output
        return [event["step"] for event in events(job, "started")][-1]


def test_a_run_whose_folder_lost_its_checkpoints_continues_from_the_store(zygote, environment, weights, tmp_path):
    """The job is killed after its second upload."""
    store, run = url(), tmp_path / "run"
    with zygote.run([*SHAPE, *JOB, f"run.dir={run}", f"checkpoint.store={store}"], environment) as job:
        job.wait_for_event("checkpoint_stored", 100)
        while len(stored(job)) < 2:
            time.sleep(0.02)
        job.signal(signal.SIGKILL)
        done = stored(job)
    shutil.rmtree(run / "checkpoints")
    assert resumed(zygote, environment, run, weights) >= done[-1] > 0
    with zygote.run([*SHAPE, *JOB, f"run.dir={tmp_path}/new", f"checkpoint.store={store}"], environment) as job:
        assert job.wait(60) == 2
        assert f"checkpoint.store={store} holds step-000024 of another run" in job.output


def test_a_store_that_cannot_be_used_is_one_sentence_before_the_launch(zygote, environment, tmp_path):
    with zygote.run([*SHAPE, *JOB, f"run.dir={tmp_path}/run", "checkpoint.store=s3://no-bucket/x"], environment) as job:
        assert job.wait(60) == 2
        assert "s3://no-bucket/x: NoSuchBucket (The specified bucket does not exist)" in job.output
        assert not (tmp_path / "run").exists()


class Apart(Launched):
    """Each agent sees a disk of its own at the path of the run folder, by a mount in its own namespace."""

    def _start(self, node, nodes, workers):
        disk = self._folder / f"disk{node}"
        for folder in (disk, self.run.path):
            folder.mkdir(exist_ok=True)
        mount = 'mount --bind "$0" "$1" && shift && exec "$@"'
        self.launcher = ("unshare", "--mount", "sh", "-c", mount, str(disk), str(self.run.path))
        return super()._start(node, nodes, workers)

    def disk(self, node):
        return self._folder / f"disk{node}"


@pytest.mark.slow
@pytest.mark.torchrun
@pytest.mark.timeout(600)
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
def test_three_nodes_without_a_common_folder_continue_after_all_of_them_died(zygote, environment, tmp_path):
    """All parts on their disks are lost, too. Node 0 still has config.yaml and the logs of the run."""
    with zygote.run(["parallel.pipelines=3", "parallel.stages=2", *JOB]) as job:
        assert job.wait(200) == 0, job.output
        expected = json.loads(job.run.summary.read_text())["weights_sha256"]
    shape = (*JOB, f"checkpoint.store={url()}")
    with Apart(tmp_path, 3, 2, shape) as job:
        job.run = RunFolder(job.disk(0))
        job.wait_for_event("checkpoint_stored", nth=2)
        for node in range(3):
            job.kill(node)
        done = [event["checkpoint"] for event in job.events("checkpoint_stored")]
    for node in range(3):
        shutil.rmtree(tmp_path / f"disk{node}/checkpoints", ignore_errors=True)
    with Apart(tmp_path, 3, 2, (*shape, "run.resume=true")) as job:
        job.run = RunFolder(job.disk(0))
        assert job.wait(range(3), 300) == [0, 0, 0], job.explain()
        assert job.events("started")[-1]["step"] >= done[-1] > 0
        assert job.committed() == 23
        assert json.loads(job.run.summary.read_text())["weights_sha256"] == expected, job.explain()
