"""From a donor to a worker that comes back: the headers of what `comm.transfer` streams."""

from __future__ import annotations

import msgspec

from .table import DONOR, JOINER, Message, Vocabulary, sent

RECEIVER = "receiver"  # a joiner's port, as long as nobody has proved anything


@sent(DONOR, RECEIVER)
class DonorHello(Message, frozen=True):
    pass


class StatePart(msgspec.Struct, frozen=True, tag="part", forbid_unknown_fields=True):
    """Elements `start` to `stop` of the state after a step: the tensors are parameters, both moments and, where sums
    are fixed-point, all exponents (`numerics.gradients`).

    session    see `Donate`
    """

    session: int
    step: int
    start: int
    stop: int


class StepGradient(msgspec.Struct, frozen=True, tag="step", forbid_unknown_fields=True):
    """A step's reduced gradient of the first `start` elements, which have been sent, and the exponents after it; apply
    it with this clip scale.

    scale None: the step was skipped, and there is no gradient.
    """

    session: int
    step: int
    start: int
    scale: float | None


class TensorHeader(msgspec.Struct, frozen=True, array_like=True):
    name: str
    dtype: str
    shape: list[int]


@sent(DONOR, JOINER)
class Parcel(Message, frozen=True):
    """The tensors' bytes follow, in this order."""

    about: StatePart | StepGradient
    tensors: list[TensorHeader]


TO_RECEIVER, TO_JOINER = Vocabulary(DONOR, RECEIVER), Vocabulary(DONOR, JOINER)
