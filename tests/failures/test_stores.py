"""Jobs that copy their checkpoints to an S3 server in its own process (`checkpoint.store`)."""

import json
import os
import shutil
import signal
import threading
import time
import zlib

import numpy as np
import pytest

from recycle_pp.export import main as exported
from recycle_pp.storage.store import Store
from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.telemetry.status import StatusReader
from recycle_pp.telemetry.stored_run import local

from .harness import Case, explain
from .launched import Launched

SHAPE = ("parallel.pipelines=2", "parallel.stages=2")
JOB = ("model=tiny", "numerics=reproducible", "run.validate_every=0", "checkpoint.every=4", "run.steps=40")


@pytest.fixture
def environment(server, proxy, monkeypatch):
    """The environment variables that name the store, here through the proxy. Also sets them in this process."""
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
    """Resumes the run in `folder` and checks its final weights. Returns the step that it started from."""
    with zygote.run([*SHAPE, *JOB, f"run.dir={folder}", "run.resume=true", *overrides], environment) as job:
        assert job.wait(200) == 0, job.output
        assert json.loads(job.run.summary.read_text())["weights_sha256"] == expected, job.output
        return [event["step"] for event in events(job, "started")][-1]


def test_the_copy_in_the_store_has_the_end_of_a_run_whose_disk_is_slow(sabotaged, tmp_path):
    store = f"file://{tmp_path}/store"
    case = Case("a slow end", "1x1", (f"checkpoint.store={store}",), steps=4, deaths=0)
    outcome = sabotaged.of(case, "stores", environment={"RECYCLE_SABOTAGE": json.dumps({"end": 1.5})})
    assert StatusReader(RunFolder(local(store))).read().state == "finished", explain(outcome)


def test_files_of_a_killed_job_that_arrive_after_its_successor_has_begun_do_not_count(zygote, tmp_path):
    """The killed job's copying process may upload files late. So after the successor has ended, the test uploads all of
    the killed job's files except config.yaml. If both jobs had the same term, a reader would use the last folder in the
    store, which is the killed job's.
    """
    store = f"file://{tmp_path}/store"
    second, first = sorted((str(tmp_path / name) for name in "ab"), key=lambda path: f"{zlib.crc32(path.encode()):08x}")
    with zygote.run([*SHAPE, *JOB, f"run.dir={first}", f"checkpoint.store={store}"]) as job:
        job.wait_for_event("checkpoint_stored", 60)
        while not Store(store).list("run"):
            time.sleep(0.02)
        job.signal(signal.SIGKILL)
    time.sleep(1.5)  # so that the copying process has ended
    late = {path: Store(store).get(path) for path in Store(store).list("run") if "config.yaml" not in path}
    assert late
    Store(store).delete(sorted(late))
    with zygote.run([*SHAPE, f"run.dir={second}", f"checkpoint.store={store}", "run.resume=true"]) as job:
        assert job.wait(100) == 0, job.output
    for path, content in late.items():
        Store(store).put(path, content)
    run = RunFolder(local(store))
    assert StatusReader(run).read().state == "finished"
    assert run.lines(run.metrics)[-1]["step"] == 39


def test_a_killed_run_continues_on_another_machine_from_its_store(zygote, environment, weights, tmp_path):
    """The job is killed after its second upload. The other machine has neither the run folder nor the settings."""
    store, run = url(), tmp_path / "run"
    slow = "+slow_at=0:0.0@10"  # slows the job down, so that it still runs when it is killed
    with zygote.run([*SHAPE, *JOB, f"run.dir={run}", f"checkpoint.store={store}", slow], environment) as job:
        job.wait_for_event("checkpoint_stored", 100)
        until = time.monotonic() + 100
        while len(stored(job)) < 2 or not any(name.endswith("/config.yaml") for name in Store(store).list("run")):
            assert time.monotonic() < until, (job.output, Store(store).list("run"))
            time.sleep(0.02)
        job.signal(signal.SIGKILL)
        done = stored(job)
    shutil.rmtree(run, ignore_errors=True)  # killed processes may still be writing
    there = tmp_path / "there"
    where = [*SHAPE, f"run.dir={there}", f"checkpoint.store={store}", "run.resume=true"]
    with zygote.run(where, environment) as job:
        assert job.wait(200) == 0, job.output
        assert json.loads(job.run.summary.read_text())["weights_sha256"] == weights, job.output
        first = [event["step"] for event in events(job, "started")][-1]
        assert first >= done[-1] > 0
        # Steps before `first` may be missing, because only some were copied to the store.
        steps = [line["step"] for line in job.run.lines(job.run.metrics)]
        assert steps == sorted(set(steps)) and set(range(first, 40)) <= set(steps), steps
    assert StatusReader(RunFolder(local(store))).read().state == "finished"
    assert exported([store, f"{tmp_path}/out"]) == 0
    with zygote.run([*SHAPE, *JOB, f"run.dir={tmp_path}/new", f"checkpoint.store={store}"], environment) as job:
        assert job.wait(60) == 2
        assert f"checkpoint.store={store} contains step-000040 of another run" in job.output


def test_a_store_that_cannot_be_used_is_reported_in_one_sentence_before_the_launch(zygote, environment, tmp_path):
    with zygote.run([*SHAPE, *JOB, f"run.dir={tmp_path}/run", "checkpoint.store=s3://no-bucket/x"], environment) as job:
        assert job.wait(60) == 2
        assert "s3://no-bucket/x: NoSuchBucket (The specified bucket does not exist)" in job.output
        assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_job_with_its_data_in_a_store_has_the_bits_of_one_with_local_files_and_survives_the_loss_of_the_store(
    zygote, environment, proxy, tmp_path
):
    """The store rejects every request once training has begun. The worker that is killed then restarts without it."""
    corpus, at = tmp_path / "corpus.bin", url()
    np.random.default_rng(0).integers(0, 256, 40_000, dtype="<u2").tofile(corpus)
    Store(at).put_file("corpus.bin", corpus)
    found = {}
    for path in (str(corpus), f"{at}/corpus.bin"):
        overrides = [*SHAPE, *JOB, f"data.path={path}", "+fail_at=20:1.0", "+rejoin_at=22:1.0"]
        with zygote.run(overrides, environment | {"XDG_CACHE_HOME": str(tmp_path / "cache")}) as job:
            job.wait_for_event("started", 100)
            proxy.judge = lambda method, path: 503
            assert job.wait(200) == 0, job.output
            assert events(job, "rejoined"), job.output
            found[path] = json.loads(job.run.summary.read_text())["weights_sha256"]
        proxy.judge = lambda method, path: None
    assert len(set(found.values())) == 1, found


@pytest.mark.slow
@pytest.mark.parametrize("upload", ["a part", "the seal", "the number of the newest"])
@pytest.mark.parametrize("arrives", [False, True])
def test_a_job_killed_during_an_upload_continues_from_a_complete_checkpoint(
    zygote, environment, proxy, weights, tmp_path, upload, arrives
):
    """The job is killed during a request of its second upload. arrives: whether the request still reaches the store."""
    store, run = url(), tmp_path / "run"
    part = {"a part": ".distcp", "the seal": "/sealed/", "the number of the newest": "/newest"}[upload]
    sealed, killed = [], threading.Event()

    def judge(method, path):
        last = method == "PUT" and part in path and len(sealed) == (2 if upload == "the number of the newest" else 1)
        if method == "PUT" and "/sealed/" in path:
            sealed.append(path)
        if not last or killed.is_set():
            return None
        job.signal(signal.SIGKILL)
        killed.set()
        return None if arrives else "close"

    proxy.judge = judge
    with zygote.run([*SHAPE, *JOB, f"run.dir={run}", f"checkpoint.store={store}"], environment) as job:
        assert killed.wait(100), job.output
        job.wait(20)
    shutil.rmtree(run, ignore_errors=True)  # killed processes may still be writing
    assert resumed(zygote, environment, tmp_path / "there", weights, f"checkpoint.store={store}") in range(4, 40, 4)


@pytest.mark.slow
def test_a_checkpoint_waits_for_a_store_that_refuses_for_a_minute(zygote, environment, proxy, tmp_path):
    """Its files stay on disk although newer checkpoints are saved meanwhile. Only the newer ones are not uploaded."""
    job_of = (*SHAPE, *JOB, "run.steps=100000", "checkpoint.every=20", f"run.dir={tmp_path}/run")
    with zygote.run([*job_of, f"checkpoint.store={url()}"], environment) as job:
        job.wait_for_event("checkpoint_stored", 100)
        begun = time.monotonic()
        proxy.judge = lambda method, path: 503 if time.monotonic() < begun + 60 else None
        time.sleep(60)
        before, steps = stored(job), len(job.run.lines(job.run.metrics))
        while len(stored(job)) < len(before) + 2:
            assert time.monotonic() < begun + 120, job.output
            time.sleep(0.2)
        waited = stored(job)[len(before)]
        for event in events(job, "checkpoint_not_stored"):
            assert event["detail"] == f"checkpoint step-{waited:06d} is still being uploaded", job.output
        assert waited < events(job, "checkpoint_not_stored")[0]["checkpoint"]
        assert len(job.run.lines(job.run.metrics)) > steps > before[-1] + 100  # training has continued meanwhile
        job.signal(signal.SIGTERM)
        assert job.wait(60) == 143, job.output


@pytest.mark.slow
def test_a_resume_waits_for_a_store_that_refuses_for_forty_seconds(zygote, environment, proxy, tmp_path):
    islands = (f"islands.store={url()}", "islands.name=a", "islands.steps=4")
    job_of = (*SHAPE, *JOB, f"run.dir={tmp_path}/run", f"checkpoint.store={url()}", *islands)
    with zygote.run([*job_of, "run.steps=100000"], environment) as job:
        job.wait_for_event("checkpoint_stored", 100)
        job.signal(signal.SIGTERM)
        assert job.wait(60) == 143, job.output
    begun = time.monotonic()
    proxy.judge = lambda method, path: 503 if time.monotonic() < begun + 40 else None
    last = len(job.run.lines(job.run.metrics))
    with zygote.run([*job_of, f"run.steps={last + 4}", "run.resume=auto"], environment) as job:
        assert job.wait(200) == 0, job.output
    assert time.monotonic() > begun + 40 and len(job.run.lines(job.run.metrics)) == last + 4


@pytest.mark.slow
def test_an_island_continues_and_can_be_ended_while_a_restarted_worker_waits_for_the_store(
    zygote, environment, proxy, tmp_path
):
    islands = (f"islands.store={url()}", "islands.name=a", "islands.steps=10", "islands.max_local=1000000")
    job_of = ("parallel=2x1", *JOB, "run.steps=100000", f"run.dir={tmp_path}/run")
    with zygote.run([*job_of, *islands], environment) as job:
        job.wait_for_event("checkpoint_saved", 100)
        proxy.judge = lambda method, path: 503
        victim = [event["pid"] for event in events(job, "spawned") if event["worker"] == "1.0"][-1]
        os.kill(victim, signal.SIGKILL)
        before = len(job.run.lines(job.run.metrics))
        time.sleep(30)  # longer than the worker repeats its requests
        assert len(job.run.lines(job.run.metrics)) > before + 20 and not events(job, "rejoined")
        job.signal(signal.SIGTERM)
        assert job.wait(60) == 143, job.output


class Apart(Launched):
    """Each agent has its own disk at the path of the run folder, mounted in its own namespace."""

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
def test_three_nodes_without_a_shared_folder_continue_after_all_of_them_died(zygote, environment, tmp_path):
    """All checkpoints on their disks are lost, too. Node 0 still has config.yaml and the logs of the run."""
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
        assert job.committed() == 39
        assert json.loads(job.run.summary.read_text())["weights_sha256"] == expected, job.explain()


@pytest.mark.slow
@pytest.mark.torchrun
@pytest.mark.timeout(600)
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
def test_nodes_without_a_shared_folder_continue_from_a_checkpoint_that_only_node_0_has(environment, proxy, tmp_path):
    """The store refuses all uploads after the first checkpoint, until both nodes are killed."""
    shape = (*JOB, "run.steps=100000", f"checkpoint.store={url()}")
    with Apart(tmp_path, 2, 2, shape) as job:
        job.run = RunFolder(job.disk(0))
        job.wait_for_event("checkpoint_stored")
        proxy.judge = lambda method, path: 403 if method == "PUT" else None
        before = len(job.events("checkpoint_saved"))
        job.wait_for_event("checkpoint_saved", nth=before + 3)
        for node in range(2):
            job.kill(node)
        saved, stored = (job.events(f"checkpoint_{word}")[-1]["checkpoint"] for word in ("saved", "stored"))
    proxy.judge = lambda method, path: None
    with Apart(tmp_path, 2, 2, (*shape, f"run.steps={saved + 8}", "run.resume=auto")) as job:
        job.run = RunFolder(job.disk(0))
        assert job.wait(range(2), 300) == [0, 0], job.explain()
        assert job.events("started")[-1]["step"] >= saved > stored
