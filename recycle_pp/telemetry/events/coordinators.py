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
    """A new coordinator was elected. `rank`: rank of its supervisor. `seconds`: from the loss to the election. (The
    `term` of this line is the new coordinator's.)"""

    exported = True
    rank: Count
    seconds: Seconds

    def text(self) -> str:
        return f"rank {self.rank} is the new coordinator, elected in {1000 * self.seconds:.0f} ms"


class NodeJoined(WorkerEvent):
    """A new node replaces a lost one. `rank`: rank of its supervisor. `host`: its name."""

    exported = True
    rank: Count
    host: str | None

    def text(self) -> str:
        return f"{self.host} replaces the lost node of worker {self.worker}"


class LinkRestored(WorkerEvent):
    """A worker that had left because a link was cut is restarted, because its node reaches all others again. `rank`:
    rank of its supervisor. `host`: its node."""

    rank: Count
    host: str | None

    def text(self) -> str:
        return f"{self.host} reaches all nodes of the job again: worker {self.worker} is restarted"


class SupervisorBack(WorkerEvent):
    """A supervisor that had lost its connection is connected again. `rank`: its rank."""

    rank: Count

    def text(self) -> str:
        return f"the supervisor of rank {self.rank} is connected again"
