"""Workers, micro-batches, boundary tensors and ops.

Worker(1, 2), str(Worker(1, 2)) == "1.2", Worker.parse("1.2")
Op(OpKind.FORWARD, (1, 0), 2, Worker(0, 2), start=4.0, end=5.0)     # micro-batch 0 of pipeline 1, run by W(0,2)
input_of(OpKind.FORWARD, (1, 0), stage=2, stages=4)                 # its input: the output of F at stage 1
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .op_kinds import OpKind, TensorKind

MicroBatch = tuple[int, int]
"""(pipeline, index). Global ids count the micro-batches pipeline by pipeline."""

Tensor = tuple[TensorKind, MicroBatch, int]
"""A boundary tensor: its kind, its micro-batch, and the stage that makes it.

("F", mb, s): output of F at stage s, consumed by stage s + 1.
("B", mb, s): gradient of the input of stage s, made at stage s by I or B, consumed by stage s - 1."""


class Worker(NamedTuple):
    """W(d, s): the process that runs stage s of pipeline d."""

    pipeline: int
    stage: int

    def __str__(self) -> str:
        return f"{self.pipeline}.{self.stage}"

    @classmethod
    def parse(cls, text: str) -> Worker:
        """Parse "1.2" or the JSON key "1,2". Raises ValueError for any other form."""
        parts = text.replace(",", ".").split(".")
        if len(parts) != 2 or not all(part.strip().isdecimal() for part in parts):
            raise ValueError(f"a worker is written PIPELINE.STAGE, like 1.2, not {text!r}")
        return cls(int(parts[0]), int(parts[1]))


class Done(NamedTuple):
    """An op of a broken step that ended before time 0, the moment from which the rest of the step is planned.

    delivered: whether the receiver or the replay log of a live worker has the op's output."""

    op: OpKind
    microbatch: MicroBatch
    stage: int
    worker: Worker
    delivered: bool = False


class Op(NamedTuple):
    """One op of a plan or trace. `microbatch` is None for O. Times are in the plan's unit."""

    kind: OpKind
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


def input_of(kind: OpKind, microbatch: MicroBatch, stage: int, stages: int) -> Tensor | None:
    """The boundary tensor that an op takes at `stage`, None if it takes none. stages: number of stages."""
    if kind.takes is None:
        return None
    maker = stage - kind.takes.step
    return (kind.takes, microbatch, maker) if 0 <= maker < stages else None


def output_of(kind: OpKind, microbatch: MicroBatch, stage: int, stages: int) -> Tensor | None:
    """The boundary tensor that an op makes at `stage`, None if it makes none. stages: number of stages."""
    if kind.makes is None:
        return None
    taker = stage + kind.makes.step
    return (kind.makes, microbatch, stage) if 0 <= taker < stages else None
