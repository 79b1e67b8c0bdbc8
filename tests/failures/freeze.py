"""Stops one thread of another process. The thread then looks as if it waited for a kernel that never ends.

    with Frozen(pid):              # stops the main thread; all other threads continue
        ...
    with Frozen(pid, held=2.0):    # if the process is killed meanwhile, it cannot be reaped for two more seconds

Uses ptrace(2), like a debugger. `PTRACE_SEIZE` and `PTRACE_INTERRUPT` act on a thread, not on a process.
"""

import contextlib
import ctypes
import os
import threading
import time

from recycle_pp.linux.processes import process_stat

_SEIZE, _INTERRUPT, _DETACH = 0x4206, 0x4207, 17
_WALL = 0x40000000  # wait for any kind of child thread (waitpid(2))
_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


class Frozen(contextlib.AbstractContextManager):
    """A stopped main thread.

    at    time.monotonic() of the stop
    idle  stop the thread while it sleeps in a system call, so that it does not hold Python's lock
    """

    def __init__(self, pid: int, held: float = 0.0, idle: bool = False) -> None:
        self._thread, self._held, self._idle = pid, held, idle
        self._stands, self._over = threading.Event(), threading.Event()
        self._error: OSError | None = None
        # One thread makes all requests, because ptrace accepts them only from the tracing thread.
        self._tracer = threading.Thread(target=self._trace, name="tracer", daemon=True)
        self.at = 0.0

    def __enter__(self) -> "Frozen":
        self._tracer.start()
        self._stands.wait(10)
        if self._error is not None:
            raise self._error
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._tracer.join(10)

    def _trace(self) -> None:
        try:
            while self._idle and self._state() != "S":
                pass
            self._ask(_SEIZE)
            self._ask(_INTERRUPT)
            os.waitpid(self._thread, _WALL)
            self.at = time.monotonic()
        except OSError as error:
            self._error = error
            return
        finally:
            self._stands.set()
        with contextlib.suppress(OSError):
            while not self._over.wait(0.02):
                if self._state() in "ZX":
                    self._over.wait(self._held)
                    os.waitpid(self._thread, _WALL)  # before this call no other process can reap it
                    return
            self._ask(_DETACH)

    def _state(self) -> str:
        stat = process_stat(self._thread, thread=self._thread)
        if stat is None:
            raise ProcessLookupError(self._thread)
        return stat.state

    def _ask(self, request: int) -> None:
        if _libc.ptrace(request, self._thread, None, None) != 0:
            raise OSError(ctypes.get_errno(), f"ptrace({request:#x}) of thread {self._thread}")
