"""Starting a worker, detecting its death and finding the cause."""

import os
import resource
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from recycle_pp.comm.nccl.environment import ENVIRONMENT
from recycle_pp.supervisor.child import Child
from recycle_pp.supervisor.worker_start import default_environment
from recycle_pp.telemetry.log_file import LogFile
from recycle_pp.wire.worker_spec import WorkerSpec

from .children import spawned, wait_for_death, wait_for_log

HERE = Path(__file__).parent
pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize(
    ("play", "cause", "detail"),
    [
        ("kill", "signal", "SIGKILL"),
        ("crash", "signal", "SIGSEGV"),
        ("leave", "exit", "exit code 7; its log ends: incarnation 2 plays leave"),
        ("raise", "exception", "ValueError: no such token\n"),
        ("long", "exception", "the end"),
    ],
)
def test_the_cause_of_each_death_is_found(play, cause, detail, tmp_path):
    with spawned(play, tmp_path) as child:
        death = wait_for_death(child)
    assert death.cause == cause
    assert death.detail.endswith(detail)
    assert death.injected == (play == "kill")
    assert death.where == ("F 1,2" if play == "raise" else "")


@pytest.mark.parametrize(("ago", "cause"), [(0, "out_of_memory"), (1, "out_of_memory"), (2, "signal")])
def test_only_a_recent_kill_by_the_kernel_explains_a_death(ago, cause, tmp_path, monkeypatch):
    """ago: number of vital signs that were read after the kernel's kill."""
    kills = [3]
    monkeypatch.setattr("recycle_pp.supervisor.child.oom_kills", lambda: kills[0])
    monkeypatch.setattr("recycle_pp.supervisor.child.OOM_SECONDS", 0.0)
    with spawned("wait", tmp_path) as child:
        kills[0] = 4
        for _ in range(ago):
            child.vital_signs(1.0)
        child.send_signal(signal.SIGKILL)
        assert wait_for_death(child).cause == cause


def test_an_import_error_of_a_worker_is_reported_in_its_death(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "fake_worker.py").write_text("import no_such_module_at_all")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    child = Child.spawn({"parallel": {"backend": "nccl"}}, LogFile(tmp_path / "log"), "fake_worker")
    child.assign(WorkerSpec("", 1, "", "", 0, 0, "", {}))
    death = wait_for_death(child)
    assert death.cause == "exit"
    assert "No module named 'no_such_module_at_all'" in death.detail


def test_a_death_is_detected_within_milliseconds(tmp_path):
    delays = []
    for _ in range(3):
        with spawned("kill", tmp_path) as child:
            select.select([child.pidfd], [], [], 20)
            seen = time.monotonic()
            delays.append(seen - child.reap().at)
    assert min(delays) < 0.05


def test_the_token_is_neither_in_the_command_line_nor_in_the_environment(tmp_path):
    with spawned("wait", tmp_path) as child:
        wait_for_log(tmp_path / "log", "plays wait")
        process = Path(f"/proc/{child.pid}")
        assert b"fake_worker" in (process / "cmdline").read_bytes()
        for file in ("cmdline", "environ"):
            assert b"a very secret token" not in (process / file).read_bytes()


@pytest.mark.parametrize(
    ("name", "default"),
    [
        ("OMP_NUM_THREADS", "1"),
        ("CUDA_DEVICE_ORDER", "PCI_BUS_ID"),
        ("NCCL_NVLS_ENABLE", "0"),
        ("CUDA_MODULE_LOADING", "EAGER"),
    ],
)
@pytest.mark.parametrize("chosen", [None, "3"])
def test_a_worker_gets_default_environment_variables_unless_the_user_sets_them(
    name, default, chosen, tmp_path, monkeypatch
):
    monkeypatch.delenv(name, raising=False)
    if chosen:
        monkeypatch.setenv(name, chosen)
    with spawned("wait", tmp_path) as child:
        wait_for_log(tmp_path / "log", "plays wait")
        environment = Path(f"/proc/{child.pid}/environ").read_bytes().split(b"\0")
        assert f"{name}={chosen or default}".encode() in environment


def test_only_workers_that_use_nccl_get_its_environment():
    assert not ENVIRONMENT.keys() & default_environment({"parallel": {"backend": "auto"}}).keys()


@pytest.mark.parametrize(("interface", "expected"), [("lo", "=lo"), ("127.0.0.1", None), (None, None)])
def test_nccl_uses_the_network_interface_of_control_interface(interface, expected):
    assert default_environment({"control": {"interface": interface}}).get("NCCL_SOCKET_IFNAME") == expected


def test_the_children_of_a_worker_end_with_it(tmp_path):
    with spawned("child", tmp_path) as child:
        deadline = time.monotonic() + 20
        while not (grandchildren := psutil.Process(child.pid).children()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        child.send_signal(signal.SIGKILL)
        wait_for_death(child)
        assert psutil.wait_procs(grandchildren, 5)[1] == []


def test_a_reaped_worker_leaves_no_open_descriptor(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with spawned("leave", tmp_path) as child:
            wait_for_death(child)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_death_is_found_by_a_supervisor_with_thousands_of_open_files(tmp_path):
    """Such as the coordinator of a job with a thousand workers. select(2) refuses descriptors above 1023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    null = os.open(os.devnull, os.O_RDONLY)
    opened = [null, *(os.dup(null) for _ in range(1100))]
    try:
        with spawned("leave", tmp_path) as child:
            assert child.pidfd > 1023
            while not child.ended:
                time.sleep(0.01)
            assert "exit code 7" in child.reap().detail
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_forked_worker_has_no_descriptors_of_its_supervisor(tmp_path):
    """Runs in a separate process, because this one has threads and must not be forked."""
    script = f"""
import os, select, socket, sys, types
from pathlib import Path
sys.path.insert(0, {str(HERE)!r})
sys.modules["torch"] = types.ModuleType("torch")  # simulates an import
fork_worker = types.ModuleType("fork_worker")
def start():
    WorkerSpec.read()
    kinds = [os.readlink(f"/proc/self/fd/{{fd}}") for fd in range(3, 20) if os.path.exists(f"/proc/self/fd/{{fd}}")]
    print("sockets", sum("socket" in kind for kind in kinds), "parent", os.getppid() == PARENT, flush=True)
    return 5
fork_worker.start = start
sys.modules["fork_worker"] = fork_worker
from recycle_pp.supervisor.child import Child
from recycle_pp.telemetry.log_file import LogFile
from recycle_pp.wire.worker_spec import WorkerSpec
PARENT = os.getpid()
pair = socket.socketpair()
log = LogFile(Path({str(tmp_path / "log")!r}))
child = Child.spawn({{}}, log, "fork_worker")
child.assign(WorkerSpec("", 1, "", "", 0, 0, "", {{}}))
select.select([child.pidfd], [], [], 20)
print(child.reap(), log.flush(10.0))
pair[0].send(b"still whole"), print(pair[1].recv(20))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=False)
    assert "exit code 5" in done.stdout, done.stderr
    assert "still whole" in done.stdout
    assert (tmp_path / "log").read_text() == "sockets 0 parent True\n"
