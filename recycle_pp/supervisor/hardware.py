"""Acts on the findings about a rank's hardware, and reports them to the coordinator.

hardware = Hardware(launch, monitor, send)
hardware.begin(settings, run)       # once the job's settings are known
hardware.look()                     # at a death of the worker: a fault of its GPU may explain it
hardware.close()

A drain or a kill does not wait for the coordinator. The coordinator has the planner give a slow worker less work
(`coordinator/hardware.py`).
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import MappingProxyType

from recycle_pp.config.settings import Settings
from recycle_pp.health.host import HOST
from recycle_pp.health.ladder import LOOKS
from recycle_pp.health.watch import Watch
from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.wire.launch import Launch
from recycle_pp.wire.messages.health import Finding, Health
from recycle_pp.wire.messages.supervisors import Death

from .process_monitor import ProcessMonitor


class Hardware:
    def __init__(self, launch: Launch, monitor: ProcessMonitor, send: Callable[[Health], None]) -> None:
        self._launch = launch
        self._monitor = monitor
        self._send = send
        self._watch: Watch | None = None
        self._silence: asyncio.Task[None] | None = None
        self._newest = Health([], [])
        self._done: set[str] = set()  # actions that were taken; none is taken twice

    def begin(self, settings: Settings, run: RunFolder, quarantined: Mapping[str, str] = MappingProxyType({})) -> None:
        """quarantined: see `SupervisorWelcome`"""
        seconds = settings.control.health
        if not seconds:
            return
        loop = asyncio.get_running_loop()

        def report(message: Health) -> None:  # runs in the thread of the watch
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._reported, message)

        self._watch = Watch(self._launch.local_rank, seconds, settings.run.device, run.quarantine, report, quarantined)
        self._watch.start()
        self._silence = asyncio.create_task(self._report_silence(self._watch, seconds))

    def look(self) -> None:
        if self._watch is not None:
            self._watch.look()

    def close(self) -> None:
        if self._watch is not None and self._silence is not None:
            self._watch.close()
            self._silence.cancel()

    def _reported(self, message: Health) -> None:
        self._newest = message
        self._send(message)
        for finding in message.findings:
            if finding.action in ("drain", "kill") and finding.action not in self._done:
                self._done.add(finding.action)
                self._act(finding)

    def _act(self, finding: Finding) -> None:
        death = Death("quarantine", f"{finding.device}: {finding.detail}")
        self._monitor.bar(death, signal.SIGKILL if finding.action == "kill" else signal.SIGTERM)

    async def _report_silence(self, watch: Watch, seconds: float) -> None:
        """Reports a check of the hardware that does not end. The finding is only a note, because a driver may hang
        while the GPU works."""
        while True:
            await asyncio.sleep(seconds)
            if watch.silent > LOOKS * seconds:
                hangs = Finding(HOST, "nvml", "note", f"reading the hardware has hung for {watch.silent:.0f} s")
                self._send(Health(self._newest.readings, [*self._newest.findings, hangs]))
