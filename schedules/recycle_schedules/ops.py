"""Workers, micro-batches, tensors and ops.

Worker(1, 2), str(Worker(1, 2)) == "1.2", Worker.parse("1.2")
Op("F", (1, 0), 2, Worker(0, 2), start=4.0, end=5.0)     # micro-batch 0 of pipeline 1, stage 2, run by W(0,2)
"""

from __future__ import annotations

from typing import Any, NamedTuple

KINDS = ("F", "I", "W", "B", "O")
"""F: forward. I: backward for the input. W: backward for the weights. B: both in one op. O: optimizer step."""

F, I, W, B, O = range(5)
"""Codes of the kinds in flat arrays: indices into KINDS."""

MicroBatch = tuple[int, int]
"""(pipeline, index). Global ids count the micro-batches pipeline by pipeline."""

Tensor = tuple[str, MicroBatch, int]
"""A boundary tensor.

("F", mb, s): output of F at stage s, consumed by stage s + 1.
("B", mb, s): gradient of the input of stage s, made there by I or B, consumed by stage s - 1."""


class Worker(NamedTuple):
    """W(d, s): the process that runs stage s of pipeline d."""

    pipeline: int
    stage: int

    def __str__(self) -> str:
        return f"{self.pipeline}.{self.stage}"

    @classmethod
    def parse(cls, text: str) -> Worker:
        """Parse "1.2" or the JSON key "1,2". ValueError for any other form."""
        parts = text.replace(",", ".").split(".")
        if len(parts) != 2 or not all(part.strip().isdecimal() for part in parts):
            raise ValueError(f"a worker is written PIPELINE.STAGE, like 1.2, not {text!r}")
        return cls(int(parts[0]), int(parts[1]))


class Done(NamedTuple):
    """An op that ended before time 0.

    delivered: the receiver, or a surviving replay log, has its output."""

    op: str
    microbatch: MicroBatch
    stage: int
    worker: Worker
    delivered: bool = False


class Op(NamedTuple):
    """One op of a plan or trace. `microbatch` is None for O. Times are in the plan's unit."""

    kind: str
    microbatch: MicroBatch | None
    stage: int
    worker: Worker
    start: float
    end: float

    def to_json(self) -> dict[str, Any]:
        """The op as an entry of a plan file."""
        return {
            "op": self.kind,
            "microbatch": None if self.microbatch is None else list(self.microbatch),
            "stage": self.stage,
            "worker": list(self.worker),
            "start": self.start,
            "end": self.end,
        }
