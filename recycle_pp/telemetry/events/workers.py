"""Workers that start, leave, return or become slow."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from recycle_pp.telemetry.words import plural
from recycle_pp.wire.records import Count, Number

from .event import WorkerEvent


class Spawned(WorkerEvent):
    """A worker process was started: `rank`, `pid`, `host`."""

    printed = False
    rank: Count
    pid: Count
    host: str | None


class Respawned(WorkerEvent):
    """A dead worker is restarted. `respawns`: number of restarts so far."""

    respawns: Count

    def text(self) -> str:
        return f"worker {self.worker} is restarted"


class GivenUp(WorkerEvent):
    """A dead worker is no longer restarted. `respawns`: number of its restarts."""

    respawns: Count

    def text(self) -> str:
        if self.respawns == 0:
            return f"worker {self.worker} is not restarted: run.respawns allows no restart"
        return f"worker {self.worker} died again after {plural(self.respawns, 'restart')} and is no longer restarted"


class Joining(WorkerEvent):
    """A new worker process receives the state. `donor`: the peer that sends it."""

    printed = False
    donor: str


class Rejoined(WorkerEvent):
    """The worker takes part again."""

    exported = True

    def text(self) -> str:
        return f"worker {self.worker} is back"


class Evicted(WorkerEvent):
    """The worker got SIGTERM. It finishes the step, hands over its work and leaves."""

    def text(self) -> str:
        return f"worker {self.worker} got SIGTERM; it finishes this step, hands over its work and leaves"


class Left(WorkerEvent):
    """The worker has handed over its work and left the job."""

    exported = True

    def text(self) -> str:
        return f"worker {self.worker} has handed over its work and left"


class Slow(WorkerEvent):
    """The worker became slow, so faster peers take over a part of its work. `factor`: duration of its ops as a multiple
    of the usual one. `against`: whose duration is the usual one: that of its "peers", or of "itself" in its first 100
    steps."""

    exported = True
    factor: Number
    against: str = "peers"

    def text(self) -> str:
        if self.against == "itself":
            usual, consequence = "in its own first steps", "faster peers take over a part of its work"
        else:
            usual, consequence = "its peers'", "they take over a part of its work"
        return f"worker {self.worker} is slow: its ops take {self.factor} times as long as {usual}; {consequence}"


class SlowNoMore(WorkerEvent):
    """The worker is as fast as before again. `factor` and `against`: as for `slow`."""

    exported = True
    factor: Number
    against: str = "peers"

    def text(self) -> str:
        usual = "in its own first steps" if self.against == "itself" else "its peers"
        return f"worker {self.worker} is as fast as {usual} again"


class Refused(WorkerEvent):
    """A worker cannot take part. Either its `platform` differs from `expected`, the platform of the others, or `detail`
    gives the reason."""

    platform: str | UnsetType = UNSET
    expected: str | UnsetType = UNSET
    detail: str | UnsetType = UNSET

    def text(self) -> str:
        reason = self.detail or f"it runs on {self.platform}, the others on {self.expected}"
        return f"worker {self.worker} is rejected: {reason}"


class Mismatch(WorkerEvent):
    """A copy of sharded state is wrong (`control.mismatch=third`). The step is repeated without the worker that holds
    it. `host`: its node; `detail`: the wrong unit."""

    host: str | None
    detail: str

    def text(self) -> str:
        return (
            f"worker {self.worker} on {self.host or 'its host'} has wrong state: {self.detail}; this is probably a "
            "hardware fault there. The step is redone without this worker"
        )
