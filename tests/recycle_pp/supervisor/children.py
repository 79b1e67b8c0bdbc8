"""Fake workers that are started like real ones.

    with spawned("leave", tmp_path) as child:               # in a fresh interpreter
        assert wait_for_death(child).cause == "exit"
    with spawned("wait", tmp_path, server) as child:        # forked by a fork server
        wait_for_log(tmp_path / "log", "plays wait")

The first argument selects what the worker does, see `fake_worker.py`. The worker is killed and reaped at the end.
"""

import os
import select
import signal
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from recycle_pp.supervisor.child import Child
from recycle_pp.telemetry.log_file import LogFile
from recycle_pp.wire.worker_spec import WorkerSpec


@contextmanager
def as_a_supervisor():
    """Hides torch, because a process that has imported it forks its workers. Its children find fake_worker.py."""
    torch = sys.modules.pop("torch", None)
    try:
        with patch.dict(os.environ, PYTHONPATH=str(Path(__file__).parent)):
            yield
    finally:
        if torch is not None:
            sys.modules["torch"] = torch


@contextmanager
def spawned(play, tmp_path, server=None):
    spec = WorkerSpec("127.0.0.1", 1, "a very secret token", "", 3, 2, str(tmp_path), {"data": {"path": play}})
    log = LogFile(tmp_path / "log")
    with as_a_supervisor():
        child = Child.spawn({"parallel": {"backend": "nccl"}}, log, "fake_worker", server)
    child.assign(spec)
    try:
        yield child
    finally:
        if child.pidfd != -1:  # not reaped
            child.send_signal(signal.SIGKILL)
            child.reap(5.0)
        log.close()
        assert log.flush(10.0)


def wait_for_death(child, seconds=20.0):
    assert select.select([child.pidfd], [], [], seconds)[0], "the worker did not die in time"
    return child.reap()


def wait_for_log(path, text, seconds=20.0):
    deadline = time.monotonic() + seconds
    while text not in (path.read_text() if path.exists() else ""):
        assert time.monotonic() < deadline, f"no {text!r} in the log"
        time.sleep(0.01)
