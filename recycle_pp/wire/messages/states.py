"""Headers of the stream of `comm.transfer`, from a donor to a worker that rejoins."""

from __future__ import annotations

import msgspec

from .table import DONOR, JOINER, Message, Vocabulary, sent

RECEIVER = "receiver"  # a joiner's port, before authentication


@sent(DONOR, RECEIVER)
class DonorHello(Message, frozen=True):
    pass


class StatePart(msgspec.Struct, frozen=True, tag="part", forbid_unknown_fields=True):
    """Elements `start` to `stop` of the state after a step. The tensors are parameters, both moments and, if sums are
    fixed-point, all exponents (`numerics.gradients`).

    session    see `Donate`
    """

    session: int
    step: int
    start: int
    stop: int


class StepGradient(msgspec.Struct, frozen=True, tag="step", forbid_unknown_fields=True):
    """The reduced gradient of the first `start` elements, which were sent before this step, and the exponents after it.
    Apply it with this clip scale.

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
    """Followed by the bytes of the tensors, in this order."""

    about: StatePart | StepGradient
    tensors: list[TensorHeader]


TO_RECEIVER, TO_JOINER = Vocabulary(DONOR, RECEIVER), Vocabulary(DONOR, JOINER)
