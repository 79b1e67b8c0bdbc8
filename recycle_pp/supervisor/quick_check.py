"""Checks this machine while the workers start, in a process of its own that nothing waits for.

check = QuickCheck(send)
check.begin(run, settings)      # later calls send(MachineChecked(...)); never, if the check fails or hangs
check.close()                   # kills the process

Used only at the start of a job that spans hosts, and only by the first supervisor of each machine.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

import msgspec

from recycle_pp.config.settings import Settings
from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.wire.messages.supervisors import MachineChecked

MODULE = "recycle_pp.machine_checks.quick"


class QuickCheck:
    def __init__(self, send: Callable[[MachineChecked], None]) -> None:
        self._send = send
        self._process: subprocess.Popen[bytes] | None = None
        self._begun = False

    def begin(self, run: RunFolder, settings: Settings) -> None:
        """Only the first call has an effect."""
        if self._begun:
            return
        self._begun = True
        command = [sys.executable, "-m", MODULE, f"--run={run.path}"]
        command += ["--nccl"] * (settings.parallel.backend == "nccl")
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, args=(command, loop), name="quick check", daemon=True).start()

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()

    def _run(self, command: list[str], loop: asyncio.AbstractEventLoop) -> None:
        with suppress(OSError, RuntimeError, msgspec.MsgspecError):  # not started, loop closed, or check failed
            process = self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
            assert process.stdout is not None
            found = msgspec.json.decode(process.stdout.readline(), type=MachineChecked)
            loop.call_soon_threadsafe(self._send, found)
            process.wait()
