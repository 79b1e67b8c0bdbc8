"""`recycle_pp.doctor` names the cause and the worker of staged hangs, in jobs with real torchrun agents."""

import contextlib
import json
import os
import subprocess
import sys
import textwrap
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from recycle_pp.diagnosis.finding import BROKEN, WARNING, WELL
from recycle_pp.doctor import of_run, text
from recycle_pp.linux.processes import die_with_parent

from . import network, nodes
from .disk import Disk
from .freeze import Frozen
from .harness import Case
from .launched import Launched

pytestmark = [pytest.mark.torchrun, pytest.mark.timeout(600)]
slow = pytest.mark.slow
STEPS = ("run.steps=100000", "run.validate_every=0", "run.standby=off")
SHAPE = {"nodes": 3, "workers": 1}
IN_WORKERS = """
import os, sys
if "recycle_pp.execution.worker" in " ".join(sys.orig_argv) and os.environ["RANK"] in os.environ["STAGED_RANKS"]:
    exec(os.environ["STAGED"])
"""


@pytest.fixture
def staged(tmp_path, monkeypatch):
    """staged(code, ranks="1"): the workers of these ranks (default: all) run the code before they import anything."""

    def stage(code, ranks="012"):
        (tmp_path / "sitecustomize.py").write_text(IN_WORKERS)
        monkeypatch.setenv("STAGED", textwrap.dedent(code))
        monkeypatch.setenv("STAGED_RANKS", ranks)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))

    return stage


def asked(run, seconds=150.0):
    """The first diagnosis of the run whose verdict is not `well`."""
    deadline = time.monotonic() + seconds
    while not run.config.exists() or (diagnosis := of_run(str(run.path))).code == WELL:
        assert time.monotonic() < deadline, run.config.exists() and diagnosis
        time.sleep(0.3)
    return diagnosis


def check(job, verdict, worker, code=BROKEN, seconds=150.0):
    diagnosis = asked(job.run, seconds)
    print(f"\n{text(diagnosis)}")
    assert (diagnosis.verdict, diagnosis.worker, diagnosis.code) == (verdict, worker, code), diagnosis


def launched(folder, *arguments, kind=Launched, **how):
    return kind(folder, **(SHAPE | how), arguments=[*STEPS, *arguments])


def test_a_kill_in_the_first_forward(tmp_path):
    with launched(tmp_path, "+fail_at=0:1.0@forward", "+rejoin_at=9:1.0") as job:
        job.wait_for_event("rejoined")
        check(job, "rank_death", "1.0", WARNING)
        command = [sys.executable, "-m", "recycle_pp.doctor", str(job.run.path), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == WARNING
        assert json.loads(done.stdout).keys() == {"verdict", "worker", "evidence", "next"}


@slow
def test_a_sleep_before_ready(staged, tmp_path):
    staged("import time, recycle_pp.model.stage as it\nit.Stage.__init__ = lambda *args: time.sleep(1000)", ranks="1")
    with launched(tmp_path) as job:
        check(job, "never_started", "1.0")


MODEL = """
import os, time
from pathlib import Path
from torch import nn
from torch.nn import functional as F

class Compiled(nn.Module):
    '''Compiles in its first forward if its cache is empty.'''
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, 16), nn.Linear(16, 256, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, input_ids):
        cache = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        if type(self.head.weight).__name__ != "FakeTensor" and self.training and not list(cache.iterdir()):
            time.sleep(20)
            (cache / "kernel").touch()
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x).float()

def loss(output, batch):
    return F.cross_entropy(output.flatten(0, 1), batch.labels.flatten())
"""


@slow
def test_a_first_forward_that_compiles_on_only_one_worker_because_its_cache_is_empty(tmp_path, monkeypatch):
    (tmp_path / "compiled.py").write_text(MODEL)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    for name in ("warm", "cold"):
        (tmp_path / name).mkdir()
    (tmp_path / "warm" / "kernel").touch()

    class Job(Launched):
        def _start(self, node, nodes, workers):
            monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / ("cold" if node == 1 else "warm")))
            return super()._start(node, nodes, workers)

    model = ["model=custom", "model.build=compiled:Compiled", "model.loss=compiled:loss", "model.layers=blocks"]
    with launched(tmp_path, *model, "model.sequence=16", kind=Job) as job:
        check(job, "compile_skew", "1.0", WARNING)
        job.wait_for_step(3, 250)
        check(job, "compile_skew", "1.0", WARNING)


@slow
def test_one_thread_frozen_from_outside(tmp_path):
    with launched(tmp_path) as job:
        job.wait_for_step(5, 250)
        with Frozen(job.worker("1.0").pid):
            check(job, "stuck_op", "1.0")
            job.wait_for_event("resumed")
            check(job, "stuck_op", "1.0", WARNING)


LATE = """
from tests.failures import late_device as late

class Marks(late.Late):
    '''A queue that never empties after its 200th mark.'''
    placed = 0
    def place(self):
        Marks.placed += 1
        mark = late.Mark()
        mark._time += 1e6 if Marks.placed > 200 else 0
        return mark

late.put(Marks())
"""


@slow
def test_a_device_whose_queue_never_empties(staged, tmp_path):
    staged(LATE, ranks="1")
    with launched(tmp_path) as job:
        check(job, "stuck_op", "1.0")


@slow
def test_a_sum_with_one_silent_member(staged, tmp_path):
    staged("import tests.failures.sabotage")
    plan = {"hang": "reduce", "step": 5, "once": str(tmp_path / "hung")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RECYCLE_SABOTAGE", json.dumps(plan))
        with launched(tmp_path) as job:
            job.wait_for_step(4, 250)
            pid = []

            def hung():
                pid[:] = [int(text) for text in [(tmp_path / "hung").read_text()] if text]
                return bool(pid)

            job.wait_until((tmp_path / "hung").exists, "sum that hangs")
            job.wait_until(hung, "process")
            (silent,) = [event["worker"] for event in job.events("spawned") if event["pid"] == pid[0]]
            check(job, "stuck_collective", silent)
            job.wait_for_event("renewed")
            job.wait_for_step(8)
            check(job, "stuck_collective", silent, WARNING)


@slow
@pytest.mark.skipif(network.missing() is not None, reason="needs network namespaces")
def test_packets_between_two_hosts_are_dropped(tmp_path):
    case = Case("a cut", "3x2", ("control.suspicion=3", "run.standby=off", "run.validate_every=0"), steps=100_000)
    with nodes.start(case, tmp_path) as job:
        job.wait_for_step(5, 250)
        machines = [node.machine for node in job.nodes]
        job.network.cut(machines[1], machines[2])
        job.wait_for_event("links_cut")
        diagnosis = asked(job.run)
        print(f"\n{text(diagnosis)}")
        assert diagnosis.verdict == "network" and diagnosis.worker in ("2.0", "2.1"), diagnosis


class OnPipe(Launched):
    """A job on whose node 1 the data file is a pipe without a writer."""

    def _start(self, node, nodes, workers):
        pipe = self._folder / "pipe"
        mount = f'mount --bind {pipe} {self._folder / "train.txt"} && exec "$0" "$@"'
        self.launcher = ("unshare", "--mount", "sh", "-c", mount) if node == 1 else ()
        return super()._start(node, nodes, workers)


@slow
@pytest.mark.skipif(Disk.missing() is not None, reason="needs root")
def test_a_data_file_that_is_a_pipe_without_a_writer(tmp_path):
    (tmp_path / "train.txt").write_text("to be or not to be " * 10_000)
    os.mkfifo(tmp_path / "pipe")
    with launched(tmp_path, f"data.path={tmp_path / 'train.txt'}", kind=OnPipe) as job:
        check(job, "data", "1.0")


@slow
@pytest.mark.skipif(Disk.missing() is not None, reason="needs root")
def test_a_frozen_file_system(tmp_path):
    with Disk(tmp_path) as disk, launched(tmp_path, run=disk.path / "run") as job:
        job.wait_for_step(5, 250)
        with disk.frozen():
            check(job, "storage", None)


@contextlib.contextmanager
def neighbours(*cores):
    """Runs a process that spins on each of these cores."""
    parent = os.getpid()

    def placed(core):
        die_with_parent(parent)
        os.sched_setaffinity(0, {core})

    spin = [sys.executable, "-c", "while True: pass"]
    spinning = [subprocess.Popen(spin, preexec_fn=partial(placed, core)) for core in cores]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


@slow
def test_a_neighbour_that_spins(tmp_path):
    """The spinning process shares a core with a worker, whose session and threads have the lowest priority."""
    core = max(os.sched_getaffinity(0))
    with launched(tmp_path, "model.width=128", "model.sequence=128") as job:
        job.wait_for_step(3, 250)
        with neighbours(core):
            worker = job.worker("1.0")
            group = Path(f"/proc/{worker.pid}/autogroup")
            if group.exists():  # the kernel divides a core between sessions, whatever the priorities of their threads
                group.write_text("19")
            for thread in worker.threads():
                os.sched_setaffinity(thread.id, {core})
                os.sched_setscheduler(thread.id, os.SCHED_IDLE, os.sched_param(0))
            check(job, "busy", "1.0", WARNING)


@slow
def test_two_of_three_supervisors_are_stopped(tmp_path):
    with launched(tmp_path) as job:
        job.wait_for_step(5, 250)
        supervisors = job.supervisors([0, 1, 2])
        for supervisor in supervisors[:2]:
            supervisor.suspend()
        check(job, "control_plane", None)
        job.wait([2], 120)
        check(job, "control_plane", None)
        for supervisor in supervisors[:2]:
            with contextlib.suppress(psutil.NoSuchProcess):
                supervisor.resume()


@slow
def test_a_coordinator_without_a_majority(tmp_path):
    """The other two supervisors are stopped. The coordinator stops writing to the run folder, gives up and ends."""
    with launched(tmp_path) as job:
        job.wait_for_step(5, 250)
        supervisors = job.supervisors([0, 1, 2])
        for supervisor in supervisors[1:]:
            supervisor.suspend()
        check(job, "control_plane", None)
        job.wait([0], 120)
        check(job, "control_plane", None)
        for supervisor in supervisors[1:]:
            with contextlib.suppress(psutil.NoSuchProcess):
                supervisor.resume()


@slow
def test_a_healthy_run_under_load_gets_the_verdict_well_in_20_diagnoses(tmp_path):
    with launched(tmp_path) as job, neighbours(*os.sched_getaffinity(0)):
        job.wait_for_step(5, 250)
        for _ in range(20):
            diagnosis = of_run(str(job.run.path))
            assert diagnosis.code == WELL, diagnosis
            time.sleep(1.0)
