"""A process that has imported all modules of a worker, and forks one in milliseconds.

    server = ForkServer(settings, module)           # its process imports for seconds
    loop.add_reader(server.fileno(), ...)           # readable once it has imported, or has ended; then:
    problem = server.listen()                       # "", or why it cannot fork
    pid = server.fork(descriptors)                  # a new child of this process; None if it cannot fork
    server.close()

A worker's imports take seconds. With a fork server, a rank imports once, not again for every replacement, and a
worker that dies soon after the previous one is replaced just as fast. The server forks twice, so that its grandchild
becomes a child of the supervisor (PR_SET_CHILD_SUBREAPER). Then the supervisor is notified of the worker's death, and
the worker dies with the supervisor.

A process with several threads or an open GPU must not be forked, because the copy would lack the threads, and CUDA
would not work in it. If the imports have this effect, the server refuses to fork, and each worker is started in a fresh
interpreter.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from recycle_pp.linux.descriptors import readable
from recycle_pp.linux.processes import die_with_parent, name_process

from .worker_start import become_worker, default_environment

ANSWER_SECONDS = 1.0  # longest time for a fork; meanwhile the supervisor waits, and sends no heartbeat
_PR_SET_CHILD_SUBREAPER = 36
_READY = "ready"


class ForkServer:
    def __init__(self, settings: Mapping[str, Any], module: str) -> None:
        """settings: those of the job. module: see `Child.spawn`; its import_ahead(settings) is called once."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.usable = False  # whether it can fork now
        self.lost = False  # whether it could fork, but has ended since
        with theirs:
            arguments = [str(theirs.fileno()), str(os.getpid()), module]
            self._process = subprocess.Popen(
                [sys.executable, "-m", "recycle_pp.supervisor.fork_server", *arguments],
                pass_fds=[theirs.fileno()],
                env={**default_environment(settings), **os.environ},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # an error is not lost: a fresh interpreter repeats it in the worker's log
                start_new_session=True,
            )
        self._socket.send(msgspec.json.encode(settings))

    def fileno(self) -> int:
        return self._socket.fileno()

    def listen(self) -> str:
        """Reads whether the process can fork. Call it when the descriptor is readable. Returns "", or the reason why it
        cannot."""
        said = ""
        with suppress(OSError):
            said = self._socket.recv(200).decode()
        self.usable = said == _READY
        if self.usable:
            return ""
        self.close()
        return said or "its imports have failed"

    def fork(self, descriptors: Sequence[int]) -> int | None:
        """The process id of a new worker with these descriptors, see `become_worker`. None if it cannot be forked."""
        if not self.usable:
            return None
        _adopt_orphans(True)
        try:
            socket.send_fds(self._socket, [b"fork"], list(descriptors))
            if readable(self.fileno(), ANSWER_SECONDS):
                return int(self._socket.recv(16))
        except (OSError, ValueError):  # the process has ended
            pass
        finally:
            _adopt_orphans(False)
        self.close()
        self.lost = True
        return None

    def close(self) -> None:
        """Ends the process. Its workers keep running."""
        self.usable = False
        self._socket.close()
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):  # a process that waits for a disk cannot exit yet
            self._process.wait(0.2)


def _adopt_orphans(do: bool) -> None:
    """Sets whether descendants of this process that lose their parent become children of this process."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(do), 0, 0, 0)


# ------------------------------------------------------------------------------------------------ in the process


def _serve(descriptor: int, supervisor: int, module: str) -> None:
    die_with_parent(supervisor)
    name_process("recycle-forks")
    with socket.socket(fileno=descriptor) as requests:
        settings = msgspec.json.decode(requests.recv(1 << 18))
        importlib.import_module(module).import_ahead(settings)
        gc.collect()
        gc.freeze()  # keeps garbage collection in forked processes from copying all imported objects
        requests.send((_problem() or _READY).encode())
        while True:
            _, descriptors, _, _ = socket.recv_fds(requests, 16, 8)
            if not descriptors:
                return
            _fork(requests, supervisor, module, descriptors)
            for number in descriptors:
                os.close(number)


def _problem() -> str:
    """Why this process must not be forked; "" if it may be."""
    opened = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the listing's own descriptor is closed by now
            opened.append(os.readlink(link))
    if devices := [path for path in opened if path.startswith("/dev/nvidia")]:
        return f"it has opened {devices[0]}"
    threads = len(os.listdir("/proc/self/task"))
    return "" if threads == 1 else f"it has {threads} threads"


def _fork(requests: socket.socket, supervisor: int, module: str, descriptors: Sequence[int]) -> None:
    middle = os.fork()
    if middle:
        os.waitpid(middle, 0)
        return
    middle = os.getpid()
    if os.fork():
        os._exit(0)
    while os.getppid() == middle:
        time.sleep(0.0001)
    with suppress(OSError):  # if the supervisor has given up, it no longer adopts orphans, and `become_worker` exits
        requests.send(str(os.getpid()).encode())
    become_worker(module, supervisor, descriptors)


if __name__ == "__main__":
    _serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
