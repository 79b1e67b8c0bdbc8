"""Messages between an operator (`python -m recycle_pp.ctl`) and the coordinator: one request, and its answers.

After `OperatorHello` the operator sends the request. The last answer is a `Done`, a `NotDone` or an `Ended`.
"""

from __future__ import annotations

from .agreement import Leader, Place
from .table import COORDINATOR, OPERATOR, Message, Vocabulary, sent

Value = bool | int | float | str | None
"""The value of a setting."""

# ------------------------------------------------------------------------------------------ operator -> coordinator


@sent(OPERATOR, COORDINATOR)
class Drain(Message, frozen=True):
    """The worker hands over its work at the next commit and leaves, as after SIGTERM to its machine.

    force  whether to end the worker even if it is the last one of its stage, after a checkpoint
    """

    worker: tuple[int, int]
    force: bool = False


@sent(OPERATOR, COORDINATOR)
class Stop(Message, frozen=True):
    """The job finishes its step, saves a checkpoint and ends, as after SIGTERM. The last answer is an `Ended`."""


@sent(OPERATOR, COORDINATOR)
class TakeCheckpoint(Message, frozen=True):
    """The next commit saves a checkpoint."""


@sent(OPERATOR, COORDINATOR)
class ReadStacks(Message, frozen=True):
    """The answer contains the stacks of all threads of the worker."""

    worker: tuple[int, int]


@sent(OPERATOR, COORDINATOR)
class RecordProfile(Message, frozen=True):
    """The worker writes a trace of its next steps into the run folder."""

    worker: tuple[int, int]
    steps: int


@sent(OPERATOR, COORDINATOR)
class ChangeSettings(Message, frozen=True):
    """The job continues with new values of these settings. values: key -> new value."""

    values: dict[str, Value]


# ------------------------------------------------------------------------------------------ coordinator -> operator


@sent(COORDINATOR, OPERATOR)
class Elsewhere(Message, frozen=True):
    """This supervisor does not coordinate. Connect to `leader`, or retry later if it is None, because the leader is not
    known yet."""

    leader: Leader | None


@sent(COORDINATOR, OPERATOR)
class Begun(Message, frozen=True):
    """The request is accepted. text: what happens now, in words."""

    text: str


@sent(COORDINATOR, OPERATOR)
class Done(Message, frozen=True):
    """The request is done. text: the result in words; for `ReadStacks`, the stacks."""

    text: str


@sent(COORDINATOR, OPERATOR)
class NotDone(Message, frozen=True):
    """The request is refused, or has failed. reason: a sentence for the user."""

    reason: str


@sent(COORDINATOR, OPERATOR)
class Another(Message, frozen=True):
    """The sender belongs to another job than the operator's run folder."""


@sent(COORDINATOR, OPERATOR)
class Ended(Message, frozen=True):
    """The job has ended. places: addresses of its supervisors, which exit now. reason: why it ended, for the user."""

    reason: str
    places: list[Place]


TO_OPERATOR, FROM_OPERATOR = Vocabulary(COORDINATOR, OPERATOR), Vocabulary(OPERATOR, COORDINATOR)
