"""Events of a lost coordinator, and of nodes that join or return."""

from __future__ import annotations

from recycle_pp.wire.records import Count, Seconds

from .event import Event, WorkerEvent


class CoordinatorLost(Event):
    """The coordinator is lost. `rank`: rank of the supervisor that hosted it."""

    rank: Count

    def text(self) -> str:
        return f"the coordinator, in the supervisor of rank {self.rank}, is lost"


class CoordinatorElected(Event):
    """Another supervisor coordinates: `rank`. `seconds`: from the loss to the election. (`term` of this line is the new
    coordinator's.)"""

    exported = True
    rank: Count
    seconds: Seconds

    def text(self) -> str:
        return f"rank {self.rank} coordinates now, elected in {1000 * self.seconds:.0f} ms"


class NodeJoined(WorkerEvent):
    """A new node replaces a lost one: `rank`, `host`."""

    exported = True
    rank: Count
    host: str | None

    def text(self) -> str:
        return f"{self.host} replaces the lost node of worker {self.worker}"


class LinkRestored(WorkerEvent):
    """A worker had left because a link was cut. Its node reaches all others again, so it is restarted: `rank`,
    `host`."""

    rank: Count
    host: str | None

    def text(self) -> str:
        return f"{self.host} reaches all nodes of the job again: worker {self.worker} is restarted"


class SupervisorBack(WorkerEvent):
    """A supervisor that had lost its connection is connected again: `rank`."""

    rank: Count

    def text(self) -> str:
        return f"the supervisor of rank {self.rank} is connected again"
