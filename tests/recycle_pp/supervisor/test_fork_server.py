"""Workers that are forked by a fork server."""

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from recycle_pp.supervisor.child import Child
from recycle_pp.supervisor.fork_server import ANSWER_SECONDS, ForkServer
from recycle_pp.telemetry.log_file import LogFile
from recycle_pp.wire.worker_spec import WorkerSpec

HERE = Path(__file__).parent
pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def as_in_a_supervisor(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    monkeypatch.delitem(sys.modules, "torch", raising=False)  # with torch imported, a worker would be a plain fork


@contextmanager
def serving(play="wait"):
    server = ForkServer({"data": {"path": play}}, "fake_worker")
    try:
        assert select.select([server], [], [], 30)[0]
        server.problem = server.listen()
        yield server
    finally:
        server.close()


@contextmanager
def spawned(server, play, tmp_path):
    log = LogFile(tmp_path / "log")
    child = Child.spawn({}, log, "fake_worker", server)
    child.assign(WorkerSpec("127.0.0.1", 1, "token", 3, 2, str(tmp_path), {"data": {"path": play}}))
    try:
        yield child
    finally:
        if child.pidfd != -1:  # not reaped
            child.send_signal(signal.SIGKILL)
            child.reap(5.0)
        log.close()
        assert log.flush(10.0)


def process_of(server):
    return server._process.pid


def wait_for_log(path, text):
    deadline = time.monotonic() + 20
    while text not in (path.read_text() if path.exists() else ""):
        assert time.monotonic() < deadline, f"no {text!r} in the log"
        time.sleep(0.01)


def was_forked(child):
    return "recycle_pp.supervisor.fork_server" in psutil.Process(child.pid).cmdline()


@pytest.mark.parametrize(
    ("play", "cause", "detail"),
    [
        ("kill", "signal", "SIGKILL"),
        ("crash", "signal", "SIGSEGV"),
        ("leave", "exit", "exit code 7; its log ends: incarnation 2 plays leave"),
        ("raise", "exception", "ValueError: no such token\n"),
    ],
)
def test_the_death_of_a_forked_worker_and_its_cause_are_found(play, cause, detail, tmp_path):
    with serving() as server, spawned(server, play, tmp_path) as child:
        assert select.select([child.pidfd], [], [], 20)[0]
        death = child.reap()
    assert (death.cause, death.injected) == (cause, play == "kill")
    assert death.detail.endswith(detail)


def test_one_server_forks_any_number_of_workers_that_live_on_without_it(tmp_path):
    with serving() as server, spawned(server, "wait", tmp_path) as first, spawned(server, "wait", tmp_path) as second:
        server.close()
        wait_for_log(tmp_path / "log", 2 * "incarnation 2 plays wait\n")
        for child in (first, second):
            assert was_forked(child)
            assert psutil.Process(child.pid).ppid() == os.getpid(), "the supervisor is told of its death"
            assert os.getsid(child.pid) == child.pid, "Ctrl-C does not reach it"
        assert not select.select([first.pidfd, second.pidfd], [], [], 0.3)[0]


def test_a_forked_worker_has_no_descriptors_of_the_server(tmp_path):
    with serving() as server, spawned(server, "wait", tmp_path) as child:
        wait_for_log(tmp_path / "log", "plays wait")
        opened = {
            int(name): os.readlink(f"/proc/{child.pid}/fd/{name}") for name in os.listdir(f"/proc/{child.pid}/fd")
        }
    assert "pipe" in opened[0] and "pipe" in opened[3] and "lifeline" in opened[4]
    assert all(path == "/dev/null" for number, path in opened.items() if number > 4), opened


def test_a_forked_worker_dies_with_its_supervisor(tmp_path):
    script = f"""
import select, sys, time
from pathlib import Path
from recycle_pp.supervisor.child import Child
from recycle_pp.supervisor.fork_server import ForkServer
from recycle_pp.telemetry.log_file import LogFile
settings = {{"data": {{"path": "wait"}}}}
server = ForkServer(settings, "fake_worker")
select.select([server], [], [], 30)
server.listen()
child = Child.spawn(settings, LogFile(Path({str(tmp_path / "log")!r})), "fake_worker", server)
print(child.pid, server._process.pid, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as supervisor:
        descriptors = [os.pidfd_open(int(pid)) for pid in supervisor.stdout.readline().split()]
        supervisor.kill()
    try:
        for descriptor in descriptors:
            assert select.select([descriptor], [], [], 10)[0], "it still lives"
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


@pytest.mark.parametrize(("number", "seconds"), [(signal.SIGKILL, 0.5), (signal.SIGSTOP, ANSWER_SECONDS + 0.5)])
def test_if_the_server_does_not_answer_the_worker_is_started_in_a_fresh_interpreter(number, seconds, tmp_path):
    with serving() as server:
        os.kill(process_of(server), number)
        if number == signal.SIGKILL:
            server._process.wait(10)
        began = time.monotonic()
        with spawned(server, "wait", tmp_path) as child:
            assert time.monotonic() - began < seconds
            assert server.lost and not server.usable
            wait_for_log(tmp_path / "log", "incarnation 2 plays wait")
            assert not was_forked(child)


@pytest.mark.parametrize(("play", "problem"), [("thread", "it has 2 threads"), ("broken", "its imports have failed")])
def test_a_process_that_must_not_be_forked_says_why_and_workers_start_anew(play, problem, tmp_path):
    with serving(play) as server:
        assert (server.problem, server.usable, server.lost) == (problem, False, False)
        with spawned(server, "leave", tmp_path) as child:
            assert not was_forked(child)
            assert select.select([child.pidfd], [], [], 20)[0]
            assert "exit code 7" in child.reap().detail


def test_the_supervisor_adopts_no_other_orphans(tmp_path):
    """They would stay as zombies, because no one waits for them."""
    with serving() as server, spawned(server, "wait", tmp_path):
        said = subprocess.run(
            ["sh", "-c", "sleep 30 > /dev/null & echo $!"], capture_output=True, text=True, check=True
        )
        orphan = psutil.Process(int(said.stdout))
        parent = orphan.ppid()
        orphan.kill()
    assert parent != os.getpid()
