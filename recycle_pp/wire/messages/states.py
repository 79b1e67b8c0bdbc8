"""Headers in the stream (`comm.transfer`) from a donor, which sends state, to a follower, which copies it. A follower
is a rejoining worker, a worker whose stage will gain layers, or an understudy."""

from __future__ import annotations

import msgspec

from .table import DONOR, JOINER, Message, Vocabulary, sent
from .units import UnitRuns

RECEIVER = "receiver"  # the joiner's role until a donor that has connected is authenticated


@sent(DONOR, RECEIVER)
class DonorHello(Message, frozen=True):
    pass


class StatePart(msgspec.Struct, frozen=True, tag="part", forbid_unknown_fields=True):
    """The state of some units (blocks of a layer's state) after a step.

    The tensors are the masters and the optimizer's vectors. If units have seals (checksums of the state), these follow.
    If sums are fixed-point, the exponents of each of the donor's layers follow (`numerics.gradients`).

    session  see `Donate`
    units    the sent units. For each vector, one tensor contains the values of all units that have this vector
    of       see `Donate`
    """

    session: int
    step: int
    units: UnitRuns
    of: int


class StepGradient(msgspec.Struct, frozen=True, tag="step", forbid_unknown_fields=True):
    """A step's reduced gradient for units whose state the donor has sent, and the exponents of each of the donor's
    layers after the step.

    session, units, of  see `StatePart`
    scale               the step's clip scale; None: the step was skipped, and there is no gradient
    """

    session: int
    step: int
    units: UnitRuns
    of: int
    scale: float | None


class EarlyGradient(msgspec.Struct, frozen=True, tag="early", forbid_unknown_fields=True):
    """A step's reduced gradient for all units of the donor's stage, sent before the donor votes with it in this
    generation. The follower is an understudy, and applies the gradient when the step is committed.

    session   see `StatePart`
    attempt   number of the attempt at the step (`Attempt.coarser`)
    finite    see `numerics.gradients.Reduced`
    """

    session: int
    step: int
    generation: int
    attempt: int
    finite: bool


About = StatePart | StepGradient | EarlyGradient


class TensorHeader(msgspec.Struct, frozen=True, array_like=True):
    name: str
    dtype: str
    shape: list[int]


@sent(DONOR, JOINER)
class Parcel(Message, frozen=True):
    """A header. The bytes of the tensors follow in the order of `tensors`."""

    about: About
    tensors: list[TensorHeader]


TO_RECEIVER, TO_JOINER = Vocabulary(DONOR, RECEIVER), Vocabulary(DONOR, JOINER)
