"""Requests of an operator (`python -m recycle_pp.ctl`) that have no other event."""

from __future__ import annotations

from recycle_pp.wire.records import Count

from .event import Event, WorkerEvent


class SettingsChanged(Event):
    """A user has changed settings of the running job ([ctl.md](ctl.md)). `changes`: as KEY=VALUE."""

    changes: list[str]

    def text(self) -> str:
        return f"changed by ctl: {', '.join(self.changes)}"


class Profiled(WorkerEvent):
    """The worker has written a profile of its work, a trace of torch's profiler. `path`: path of the file. `steps`:
    number of steps in it."""

    path: str
    steps: Count

    def text(self) -> str:
        return f"worker {self.worker} has written a profile to {self.path}"
