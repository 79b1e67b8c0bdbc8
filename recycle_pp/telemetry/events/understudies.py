"""Workers that follow the state of a stage with one live worker, to take it over if that worker dies."""

from __future__ import annotations

from recycle_pp.config.sizes import format_size
from recycle_pp.telemetry.words import plural
from recycle_pp.wire.records import Count, Seconds

from .event import WorkerEvent


class UnderstudyBegins(WorkerEvent):
    """A worker of another stage begins to follow the state of the worker, which is the last one of its stage.
    `understudy`: the follower. `bytes`: size of the state. `step_bytes`: bytes sent in each later step. `step_seconds`:
    time to send these bytes over the link between the two, as measured, or null."""

    understudy: str
    bytes: Count
    step_bytes: Count
    step_seconds: Seconds | None

    def text(self) -> str:
        time = "" if self.step_seconds is None else f", about {1000 * self.step_seconds:.2g} ms"
        return (
            f"worker {self.worker} is the last one of its stage; worker {self.understudy} becomes its understudy: "
            f"{format_size(self.bytes)}, then {format_size(self.step_bytes)} in each step{time}"
        )


class UnderstudyInStep(WorkerEvent):
    """The understudy could take over the worker's stage now. `understudy`: as for `understudy_begins`. `seconds`: time
    since that event."""

    exported = True
    understudy: str
    seconds: Seconds

    def text(self) -> str:
        return (
            f"worker {self.understudy} is ready as understudy after {self.seconds:.2g} s: if worker {self.worker} "
            "dies, it takes over without a checkpoint"
        )


class UnderstudyDismissed(WorkerEvent):
    """The worker has a peer again, or its `understudy` is needed elsewhere or has no room left. `steps`: number of
    steps that were committed with it. `step_seconds`: mean time that these commits waited for it."""

    understudy: str
    steps: Count
    step_seconds: Seconds

    def text(self) -> str:
        return (
            f"worker {self.understudy} is no longer the understudy of worker {self.worker}, after "
            f"{plural(self.steps, 'step')} that waited {1000 * self.step_seconds:.2g} ms for it on average"
        )


class UnderstudyRefused(WorkerEvent):
    """`understudy` has no room for the state of the worker's stage: it needs `needed_bytes` and has `free_bytes`.
    If no other worker becomes the understudy, the loss of the stage means a restart from a checkpoint."""

    understudy: str
    needed_bytes: Count
    free_bytes: Count

    def text(self) -> str:
        return (
            f"worker {self.understudy} cannot be the understudy of worker {self.worker}: it has "
            f"{format_size(self.free_bytes)} of memory and needs {format_size(self.needed_bytes)}"
        )


class TookOver(WorkerEvent):
    """The worker, the last one of its stage, has died. Its `understudy` takes over its role, and the process that died
    gets the understudy's old role. `steps`, `step_seconds`: as for `understudy_dismissed`."""

    exported = True
    understudy: str
    steps: Count
    step_seconds: Seconds

    def text(self) -> str:
        return (
            f"worker {self.understudy}, the understudy, takes over as worker {self.worker}; no checkpoint is read. "
            f"{plural(self.steps, 'step')} before that waited {1000 * self.step_seconds:.2g} ms for it on average"
        )
