"""The course of the job: its start, its steps and its end."""

from __future__ import annotations

import msgspec

from recycle_pp.telemetry.words import names, plural
from recycle_pp.wire.records import Count, Seconds

from .event import Event

DATA_SECONDS = 10.0  # between two WaitsForData events


class Started(Event):
    """All workers are ready and training begins. `workers`: their number."""

    workers: Count = 0

    def text(self) -> str:
        return f"{plural(self.workers, 'worker')} {'is' if self.workers == 1 else 'are'} ready; training begins"


class PlanAdopted(Event):
    """The workers received a new plan. `lost_ops`: boundary tensors lost with dead workers. `revoked`: stages that sum
    their gradients again."""

    printed = False
    exported = True
    lost_ops: Count = 0
    revoked: list[int] = msgspec.field(default_factory=list)


class UpdateSkipped(Event):
    """A gradient was not finite, so the step changed no weight. `in_a_row`: number of consecutive such steps so far."""

    in_a_row: Count

    def text(self) -> str:
        return "the update is skipped: a gradient is NaN or infinite"


class Repeated(Event):
    """Finite gradients did not fit into the sums of `stages`. The step is repeated with different exponents. `attempt`:
    number of repetitions so far."""

    stages: list[int]
    attempt: Count

    def text(self) -> str:
        stages = f"stage{'s' * (len(self.stages) != 1)} {', '.join(map(str, self.stages))}"
        return f"the fixed-point sums of {stages} need different exponents; the step is repeated with them"


class WaitsForData(Event):
    """A worker waits for training data, and no disk with training data answers. Written every 10 s. `path`: the file of
    the oldest unfinished read. `waiting`: the workers that wait for data. `seconds`: age of that read
    ([data.md](data.md#data-files-while-the-job-runs))."""

    path: str
    waiting: list[str]
    seconds: Seconds

    def text(self) -> str:
        who, reads = ("worker", "reads") if len(self.waiting) == 1 else ("workers", "read")
        return (
            f"the disk of {self.path} has not answered for {self.seconds:.0f} s; {who} {names(self.waiting, 8)} "
            f"{reads} it, and the job waits until it answers"
        )


class Ending(Event):
    """The job finishes its step, saves and ends. `signal`: the signal that it received."""

    signal: str

    def text(self) -> str:
        return f"{self.signal}: the job finishes this step, saves a checkpoint and ends"


class Stopped(Event):
    """The job stopped before its last step. `reason`: why."""

    exported = True
    reason: str

    def text(self) -> str:
        return f"the job has stopped: {self.reason}"


class Finished(Event):
    """All steps are committed."""

    exported = True

    def text(self) -> str:
        return "the run is finished"
