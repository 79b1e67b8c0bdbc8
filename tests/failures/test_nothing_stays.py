"""No process, file or socket of a job is left after success, Ctrl-C, SIGTERM, kills or a crash."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.timeout(180)
SMALL = ["parallel=2x2", "model=tiny", "run.validate_every=0"]
ENDLESS = [*SMALL, "run.steps=1000000"]
PRIVATE = Path(tempfile.gettempdir()) / f"recycle_pp-{os.getuid()}"


@pytest.fixture
def nothing_stays():
    """A function to call with a process id while the job runs. At the end of the test, that process and all of its
    descendants must have ended."""
    before = set(os.listdir("/dev/shm"))
    seen: list[psutil.Process] = []

    def watch(pid):
        seen.extend([psutil.Process(pid), *psutil.Process(pid).children(recursive=True)])
        return seen

    yield watch
    assert seen, "the test must register a process"
    _, alive = psutil.wait_procs(seen, 15)
    try:
        assert [(process.cmdline(), process.status(), process.ppid()) for process in alive] == []
        assert {name for name in os.listdir("/dev/shm") if "chromium" not in name} <= before  # other tests run browsers
        assert not PRIVATE.exists() or not any(
            f"-{process.pid}-" in name.name for process in seen for name in PRIVATE.iterdir()
        )
    finally:
        for process in alive:
            process.kill()


@pytest.mark.slow  # quick counterpart: every case of the failure suite checks for surviving processes
def test_nothing_is_left_after_success(zygote, nothing_stays):
    with zygote.run([*SMALL, "run.steps=3"]) as job:
        job.wait_for_event("started", 60)
        nothing_stays(job.pid)
        assert job.wait(60) == 0, job.output
        assert "Traceback" not in job.output


@pytest.mark.slow  # quick counterpart: the same signals to `recycle train` in tests/recycle_pp/test_cli.py
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_job_quickly_and_quietly_and_leaves_nothing(number, code, zygote, nothing_stays):
    with zygote.run(ENDLESS) as job:
        job.wait_for_event("started", 60)
        nothing_stays(job.pid)
        begun = time.monotonic()
        job.signal(number)
        assert job.wait(30) == code, job.output
        assert time.monotonic() - begun < 10
        assert "Traceback" not in job.output
        assert f"stopped: {signal.Signals(number).name}" in job.output
        assert "died" not in job.output


@pytest.mark.slow
def test_many_signals_end_the_job_quietly_and_leave_nothing(zygote, nothing_stays):
    """A launcher repeats the signals of the terminal, and sends more as soon as one rank has ended."""
    with zygote.run(ENDLESS) as job:
        job.wait_for_event("started", 60)
        nothing_stays(job.pid)
        supervisors, over = job.supervisors(), threading.Event()

        def hail():
            while not over.wait(0.0005):
                for pid in supervisors:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGTERM)

        job.signal(signal.SIGTERM)
        thread = threading.Thread(target=hail)
        thread.start()
        try:
            assert job.wait(30) == 143, job.output
        finally:
            over.set()
            thread.join()
        assert "Traceback" not in job.output


@pytest.mark.slow
def test_nothing_is_left_after_a_kill_of_the_coordinators_supervisor(zygote, nothing_stays):
    """On a single node the launcher then ends the other ranks, as torchrun does, even if there is a new coordinator."""
    with zygote.run(ENDLESS) as job:
        job.wait_for_event("started", 60)
        nothing_stays(job.pid)
        os.kill(job.supervisors()[0], signal.SIGKILL)
        assert job.wait(30) != 0
        assert "Traceback" not in job.output
        assert "lost the coordinator" in job.output or "stopped: " in job.output


def test_nothing_is_left_after_a_kill_of_the_launcher(zygote, nothing_stays):
    with zygote.run(ENDLESS) as job:
        job.wait_for_event("started", 60)
        nothing_stays(job.pid)
        os.kill(job.pid, signal.SIGKILL)


@pytest.mark.slow
def test_nothing_is_left_after_a_kill_of_the_launchers_parent(nothing_stays, tmp_path):
    script = f"""
import sys, time
from recycle_pp.testing.local_cluster import Zygote
with Zygote() as zygote, zygote.run({ENDLESS!r}) as job:
    job.wait_for_event("started", 60)
    print(job.run.path, flush=True)
    time.sleep(60)
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)}
    ) as process:
        try:
            run = Path(process.stdout.readline().strip())
            assert run.is_dir()
            processes = nothing_stays(process.pid)
            assert len(processes) == 1 + 1 + 1 + 4 + 4  # parent, zygote, launcher, supervisors, workers
        finally:
            process.kill()
    psutil.wait_procs(processes, 15)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.slow  # quick counterpart: Ctrl-C at `recycle train` in tests/recycle_pp/test_cli.py
@pytest.mark.torchrun
def test_nothing_is_left_after_ctrl_c_at_torchrun(nothing_stays, tmp_path):
    torchrun = [Path(sys.executable).with_name("torchrun"), "--nproc-per-node=4", "-m", "recycle_pp.train"]
    output = open(tmp_path / "output", "w+")  # noqa: SIM115 (a pipe would fill up)
    process = subprocess.Popen(
        [*torchrun, *ENDLESS, f"run.dir={tmp_path / 'run'}"],
        stdout=output, stderr=output, start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while "step " not in (tmp_path / "output").read_text():
            assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "output").read_text()
            time.sleep(0.05)
        nothing_stays(process.pid)
        os.killpg(process.pid, signal.SIGINT)  # a terminal also signals torchrun and every supervisor
        assert process.wait(30) != 0
    finally:
        process.kill()
        output.close()
    text = (tmp_path / "output").read_text()
    assert "stopped: SIGINT" in text
    assert "died" not in text
    assert text.count("Traceback") <= 1  # torchrun prints one itself
