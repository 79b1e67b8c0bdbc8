"""Heartbeats of a supervisor: to the coordinator, and to the watchdog of its own event loop.

heartbeats = Heartbeats(launch, monitor)
heartbeats.begin(settings)                            # once the job's settings are known
sending = asyncio.create_task(heartbeats.send(peer))  # to one coordinator, until the task is cancelled
heartbeats.answered()                                 # call it at every message from the coordinator
heartbeats.close()
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict

from recycle_pp.config.settings import Control, Settings
from recycle_pp.consensus.agreement import PLANNING
from recycle_pp.wire.connection import Peer
from recycle_pp.wire.launch import Launch
from recycle_pp.wire.messages.supervisors import SupervisorHeartbeat

from .event_loop_watchdog import EventLoopWatchdog
from .process_monitor import ProcessMonitor
from .standby import Standby

FIRST_SECONDS = 1.0  # interval of the heartbeats before the settings are known


class Heartbeats:
    def __init__(self, launch: Launch, monitor: ProcessMonitor) -> None:
        self._launch = launch
        self._monitor = monitor
        self._settings: Settings | None = None
        self._standby: Standby | None = None
        self._watchdog: EventLoopWatchdog | None = None
        self._watched: asyncio.Task[None] | None = None  # calls `EventLoopWatchdog.beat` regularly
        self._unanswered = 0  # heartbeats since the coordinator's last message

    def begin(self, settings: Settings) -> None:
        """Switches to the interval in the settings, and enables the watchdog and standby processes.

        settings: settings of this node's workers
        """
        self._settings = settings
        self._standby = Standby(self._launch, settings)
        self._watchdog = EventLoopWatchdog(settings.control.suspicion, f"rank {self._launch.rank}")
        self._watched = asyncio.create_task(self._beat_watchdog(self._watchdog, settings.control))

    async def send(self, peer: Peer) -> None:
        """Sends heartbeats until cancelled. Aborts the connection if the coordinator does not answer.

        Counts unanswered heartbeats instead of seconds, so that a pause of this process does not count as silence of
        the coordinator."""
        self._unanswered = 0  # counts only heartbeats to this coordinator
        while True:
            control = self._settings.control if self._settings else None
            seconds = control.heartbeat if control else FIRST_SECONDS
            await asyncio.sleep(seconds)
            signs = self._monitor.signs(2 * seconds)
            peer.send(SupervisorHeartbeat(signs))
            if self._standby is not None and self._settings is not None and self._standby.due(signs):
                self._monitor.start_standby(asdict(self._settings))
            self._unanswered += 1
            if control and self._unanswered * control.heartbeat > control.suspicion + PLANNING:
                peer.abort()

    def answered(self) -> None:
        """Restarts the count of unanswered heartbeats."""
        self._unanswered = 0

    def close(self) -> None:
        if self._watchdog is not None and self._watched is not None:
            self._watchdog.close()  # at once, because ending the job may block the loop
            self._watched.cancel()

    async def _beat_watchdog(self, watchdog: EventLoopWatchdog, control: Control) -> None:
        while True:
            watchdog.beat()
            await asyncio.sleep(min(control.heartbeat, control.suspicion / 4))
