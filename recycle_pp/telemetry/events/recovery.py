"""Recoveries from deaths, lost stages and broken links."""

from __future__ import annotations

import msgspec

from recycle_pp.telemetry.words import plural
from recycle_pp.wire.records import Count, Seconds

from .checkpoints import folder
from .event import Event, WorkerEvent


class Resumed(Event):
    """All workers compute again after a death or the loss of the coordinator. `dead`: the workers that died.
    `stall_seconds`: from the first death to now. `died_at`: time of that death on the coordinator's monotonic clock.
    `lost_ops`, `redone_ops` ([figures.md](figures.md)). `left_seconds` and `left_bound_seconds`: planned and least
    possible duration of the rest of the step. `phases`: seconds after the death ([recovery.md](recovery.md))."""

    exported = True
    stall_seconds: Seconds = 0.0
    died_at: float = 0.0
    dead: list[str] = msgspec.field(default_factory=list)
    lost_ops: Count = 0
    redone_ops: Count = 0
    left_seconds: float = 0.0
    left_bound_seconds: float = 0.0
    phases: dict[str, float] = msgspec.field(default_factory=dict)

    def text(self) -> str:
        return (
            f"training continues after a stall of {1000 * self.stall_seconds:.0f} ms; "
            f"{plural(self.lost_ops, 'op')} lost, {self.redone_ops} redone"
        )


class Renewed(Event):
    """All links were rebuilt, because no worker ran an op and all waited. `waiting`: the waiting workers."""

    waiting: list[str]

    def text(self) -> str:
        first = f" (worker {self.waiting[0]} first)" if self.waiting else ""
        return f"all workers wait for each other{first}; all links are rebuilt"


class LinkFailed(WorkerEvent):
    """A link of the worker failed although no worker died, so all links are rebuilt. `reason`: the error."""

    reason: str

    def text(self) -> str:
        return f"a link of worker {self.worker} failed ({self.reason}); all links are rebuilt"


class LinksCut(Event):
    """Pairs of workers cannot connect to each other, although both workers reach the coordinator. `cut`: these pairs,
    as "1.0 2.0". `leaving`: the workers that leave for that reason; if it is empty, a stage would be lost, so the job
    waits."""

    cut: list[str]
    leaving: list[str]

    def text(self) -> str:
        cannot = f"workers {self.cut[0].replace(' ', ' and ')} cannot connect to each other"
        if self.leaving:
            return f"{cannot}; {', '.join(self.leaving)} will leave until the network between them works"
        return (
            f"{cannot}. If either of them left, a stage would be lost, so the job waits until the network between them "
            "works"
        )


class StageLost(Event):
    """A stage cannot continue. `stage`: its number. `detail`: what is lost."""

    exported = True
    stage: Count
    detail: str = "no live worker left"

    def text(self) -> str:
        return f"stage {self.stage} has {self.detail}"


class Restored(Event):
    """All workers restart from a checkpoint. `checkpoint`: number of steps in it; 0: there is none, so they restart
    from step 0. `undone_from`, `undone_to`: the first and the last step that are rolled back, or null. (New metrics and
    samples files, without the lines of these steps, replace the old ones.)"""

    exported = True
    checkpoint: Count
    undone_from: Count | None = None
    undone_to: Count | None = None

    def text(self) -> str:
        return f"all workers restart from {folder(self.checkpoint)}"
