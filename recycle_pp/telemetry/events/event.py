"""The base class of all events."""

from __future__ import annotations

import re
import time
from typing import Any, ClassVar, dataclass_transform

import msgspec

from recycle_pp.telemetry.words import when
from recycle_pp.wire.records import Count, Seconds, WorkerName


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(msgspec.field,))
class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One line of events.jsonl. The name of the event there is the class name in snake case.

    printed:    whether the console shows the sentence
    exported:   whether exporters show it next to the curves
    time:       when the event happened, not when its line was written; seconds since 1970
    step:       the current or next step, from 0
    generation: generation of the membership
    worker:     "1.2" for W(1, 2); None for the whole job

    A field has a default if runs of earlier versions may lack it.
    """

    printed: ClassVar[bool] = True
    exported: ClassVar[bool] = False

    time: Seconds = msgspec.field(default_factory=lambda: time.time())  # a lambda, so tests can replace the clock
    step: Count = 0
    generation: int = 0
    worker: WorkerName | None = None

    def text(self) -> str:
        """What happened, in words, without the step."""
        return self.name().replace("_", " ")

    def sentence(self, steps: int) -> str:
        """What happened, with the step: "step 20: worker 1.2 is back". steps: length of the whole run."""
        return f"{when(self.step, steps)}: {self.text()}"

    def line(self) -> dict[str, Any]:
        """The record of events.jsonl, without the writer's term."""
        head = {"time": self.time, "event": self.name(), "step": self.step, "generation": self.generation}
        fields = msgspec.structs.asdict(self).items()
        return head | {"worker": self.worker} | {key: value for key, value in fields if value is not msgspec.UNSET}

    @classmethod
    def name(cls) -> str:
        return re.sub(r"\B[A-Z]", r"_\g<0>", cls.__name__).lower()


class WorkerEvent(Event, kw_only=True):
    """An event of one worker."""

    worker: WorkerName
