"""Workers that are forked by a fork server."""

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import psutil
import pytest

from recycle_pp.supervisor.fork_server import ANSWER_SECONDS, ForkServer

from .children import as_a_supervisor, spawned, wait_for_death, wait_for_log

pytestmark = pytest.mark.timeout(60)


@contextmanager
def serving(play="wait"):
    with as_a_supervisor():
        server = ForkServer({"data": {"path": play}}, "fake_worker")
    try:
        assert select.select([server], [], [], 30)[0]
        server.problem = server.listen()
        yield server
    finally:
        server.close()


def process_of(server):
    return server._process.pid


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
    with serving() as server, spawned(play, tmp_path, server) as child:
        death = wait_for_death(child)
    assert (death.cause, death.injected) == (cause, play == "kill")
    assert death.detail.endswith(detail)


def test_one_server_forks_any_number_of_workers_that_outlive_it(tmp_path):
    with serving() as server, spawned("wait", tmp_path, server) as first, spawned("wait", tmp_path, server) as second:
        server.close()
        wait_for_log(tmp_path / "log", 2 * "incarnation 2 plays wait\n")
        for child in (first, second):
            assert was_forked(child)
            assert psutil.Process(child.pid).ppid() == os.getpid(), "the supervisor is notified of its death"
            assert os.getsid(child.pid) == child.pid, "Ctrl-C does not reach it"
        assert not select.select([first.pidfd, second.pidfd], [], [], 0.3)[0]


def test_a_forked_worker_has_no_descriptors_of_the_server(tmp_path):
    with serving() as server, spawned("wait", tmp_path, server) as child:
        wait_for_log(tmp_path / "log", "plays wait")
        opened = {
            int(name): os.readlink(f"/proc/{child.pid}/fd/{name}") for name in os.listdir(f"/proc/{child.pid}/fd")
        }
    assert "pipe" in opened[0] and "pipe" in opened[3] and "lifeline" in opened[4]
    assert all(path == "/dev/null" for number, path in opened.items() if number > 4), opened


def test_a_forked_worker_dies_with_its_supervisor(tmp_path):
    script = f"""
import select, sys, time
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
    command = [sys.executable, "-c", script]
    with as_a_supervisor(), subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as supervisor:
        descriptors = [os.pidfd_open(int(pid)) for pid in supervisor.stdout.readline().split()]
        supervisor.kill()
    try:
        for descriptor in descriptors:
            assert select.select([descriptor], [], [], 10)[0], "it is still alive"
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


@pytest.mark.parametrize(("number", "seconds"), [(signal.SIGKILL, 2.0), (signal.SIGSTOP, ANSWER_SECONDS + 2.0)])
def test_if_the_server_does_not_answer_the_worker_is_started_in_a_fresh_interpreter(number, seconds, tmp_path):
    with serving() as server:
        os.kill(process_of(server), number)
        if number == signal.SIGKILL:
            server._process.wait(10)
        began = time.monotonic()
        with spawned("wait", tmp_path, server) as child:
            assert time.monotonic() - began < seconds
            assert server.lost and not server.usable
            wait_for_log(tmp_path / "log", "incarnation 2 plays wait")
            assert not was_forked(child)


@pytest.mark.parametrize(("play", "problem"), [("thread", "it has 2 threads"), ("broken", "its imports have failed")])
def test_a_server_that_must_not_fork_reports_why_and_workers_start_in_a_fresh_interpreter(play, problem, tmp_path):
    with serving(play) as server:
        assert (server.problem, server.usable, server.lost) == (problem, False, False)
        with spawned("wait", tmp_path, server) as child:
            assert not was_forked(child)
        with spawned("leave", tmp_path, server) as child:
            assert "exit code 7" in wait_for_death(child).detail


def test_the_supervisor_adopts_no_orphans_of_other_programs(tmp_path):
    """They would remain as zombies, because the supervisor does not wait for them."""
    with serving() as server, spawned("wait", tmp_path, server):
        said = subprocess.run(
            ["sh", "-c", "sleep 30 > /dev/null 2>&1 & echo $!"], capture_output=True, text=True, check=True
        )
        orphan = psutil.Process(int(said.stdout))
        parent = orphan.ppid()
        orphan.kill()
    assert parent != os.getpid()
