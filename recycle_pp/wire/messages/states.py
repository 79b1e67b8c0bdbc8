"""Headers of the stream of `comm.transfer`, from a donor to a worker that rejoins."""

from __future__ import annotations

import msgspec

from .table import DONOR, JOINER, Message, Vocabulary, sent

RECEIVER = "receiver"  # a joiner's port, before authentication


@sent(DONOR, RECEIVER)
class DonorHello(Message, frozen=True):
    pass


class StatePart(msgspec.Struct, frozen=True, tag="part", forbid_unknown_fields=True):
    """The state of some units after a step. Tensors: masters, both moments, seals if units have them, and all exponents
    if sums are fixed-point (`numerics.gradients`).

    session  see `Donate`
    units    their numbers in the stage; the tensors have one after another
    of       see `Donate`
    """

    session: int
    step: int
    units: list[int]
    of: int


class StepGradient(msgspec.Struct, frozen=True, tag="step", forbid_unknown_fields=True):
    """A step's reduced gradient of the units that have been sent, and the exponents after it.

    scale  the step's clip scale; None: the step was skipped, and there is no gradient
    """

    session: int
    step: int
    units: list[int]
    of: int
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
