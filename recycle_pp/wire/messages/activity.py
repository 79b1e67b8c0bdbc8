"""The activity of a worker's main thread, as data and in words.

    str(Activity("works", "F", 20, (1, 3)))        # "F of micro-batch 1.3 in step 20"

This module imports only `typing`, because supervisors import it and must start quickly and need little memory.
"""

from __future__ import annotations

from typing import NamedTuple

# A busy machine is not a hang. So a thread that gets processor time counts as hung only after BUSY times as many
# seconds as a thread that gets none.
BUSY = 10


# Kinds of work besides the ops of a plan, whose kinds are the letters of `recycle_schedules.OpKind`.
REDUCTION, VALIDATION = "R", "V"


class Activity(NamedTuple):
    """The activity of a worker's main thread.

    kind    starts | works | device (an op waits for the device) | waits
    what    with works: F, I, W, B, O (optimizer), R (its own part of the stage's sum), V (validation), data,
            checkpoint, send, turn (from one op to the next);
            with starts: inputs (copies of data and models from a store), model, data, state (of a checkpoint), kernels,
            ready; "" before these;
            with waits: tensor, sum (all-reduce), copy (broadcast), links, commit, orders, plan
    peer    the worker that the thread waits for, if there is only one
    first   whether this is the first op of its kind, which may have to be compiled
    """

    kind: str = "starts"
    what: str = ""
    step: int = -1
    microbatch: tuple[int, int] | None = None
    peer: tuple[int, int] | None = None  # the worker W(d, s)
    first: bool = False

    def at_start(self) -> str:
        """The activity in words, for users while the job starts. For instance "build the model", or "F of micro-batch
        0.1 in step 0, compiling its kernels"."""
        if self.kind == "starts":
            return _STARTS.get(self.what, self.what)
        return f"{self}, compiling its kernels" if self.first else str(self)

    def __str__(self) -> str:
        if self.kind == "starts":
            return "its start"
        text = _WORDS.get(self.what, self.what)
        text += f" of micro-batch {self.microbatch[0]}.{self.microbatch[1]}" if self.microbatch else ""
        text += f" in step {self.step}" if self.step >= 0 else ""
        text += f" from {self.peer[0]}.{self.peer[1]}" if self.peer else ""
        return f"the wait for {text}" if self.kind == "waits" else text


_STARTS = {
    "": "import torch",
    "inputs": "copy data and model from their store",
    "model": "build the model",
    "data": "read the data",
    "state": "load the checkpoint",
    "kernels": "compile kernels",
    "ready": "ready, waiting for the others",
}
_WORDS = {
    REDUCTION: "the sum of its gradients",
    "O": "the optimizer",
    VALIDATION: "the validation",
    "data": "reading the data",
    "send": "sending the tensor",
    "turn": "the turn to the next op",
    "checkpoint": "copying the state for a checkpoint",
    "tensor": "the tensor",
    "sum": "the all-reduce",
    "copy": "the copy of the sums",
    "links": "the links",
    "commit": "the commit",
    "plan": "the plan",
}
