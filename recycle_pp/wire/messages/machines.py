"""Messages of the checks before a job (`machine_checks`). Each machine sends its results to the first machine, and
measures its links when the first machine requests it."""

from __future__ import annotations

from typing import Literal

import msgspec

from .table import LISTENER, Message, Vocabulary, sent

MACHINE, SURVEYOR = "machine", "surveyor"


@sent(MACHINE, LISTENER)
class MachineHello(Message, frozen=True):
    """The first message of a machine. number: index of the machine, from 0. host: name of the machine."""

    number: int
    host: str


class Judgement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The result of one check of one machine, see `machine_checks.check`."""

    name: str
    value: str
    limit: str
    verdict: Literal["well", "warning", "broken"]
    advice: str


class GpuExercise(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The results of one exercise on a machine's GPUs of one kind, see `health.active.Exercise`.

    rate    median rate of these GPUs, in `unit`
    digest  the most frequent digest of their results; "" if the exercise has no digest
    """

    name: str
    unit: str
    rate: float
    digest: str


class GpusFound(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The GPUs of one kind in a machine.

    kind   name of the GPU's model
    count  number of these GPUs
    links  maximum number of active NVLinks on one of these GPUs
    done   results of the exercises on these GPUs
    """

    kind: str
    count: int
    links: int
    done: list[GpuExercise]


@sent(MACHINE, SURVEYOR)
class MachineFound(Message, frozen=True):
    """The results of a machine's own checks.

    address    address that the machine uses for its connection to the first machine
    interface  network interface with this address; "" if there is none
    port       port at which the machine answers probes of its links
    writes     bytes per second when writing to the run folder; None: not measured
    reads      bytes per second when reading the training data; None: not measured
    gpus       the machine's GPUs, one entry for each kind
    """

    address: str
    interface: str
    port: int
    writes: float | None
    reads: float | None
    checks: list[Judgement]
    gpus: list[GpusFound] = []  # noqa: RUF012  # msgspec copies it


@sent(SURVEYOR, MACHINE)
class AskClock(Message, frozen=True):
    pass


@sent(MACHINE, SURVEYOR)
class MachineClock(Message, frozen=True):
    time: float  # seconds since 1970


@sent(SURVEYOR, MACHINE)
class ProbeLink(Message, frozen=True):
    """Measure the link to this machine."""

    address: str
    port: int


@sent(MACHINE, SURVEYOR)
class LinkProbed(Message, frozen=True):
    """The answer to `ProbeLink`.

    seconds    time of a small message, one way
    bandwidth  bytes per second
    error      why there is no connection; "" if there is one
    """

    seconds: float
    bandwidth: float
    error: str = ""


@sent(SURVEYOR, MACHINE)
class Judged(Message, frozen=True):
    """The checks are over. code: exit code of the command, the same on all machines."""

    code: int


FROM_MACHINE, TO_MACHINE = Vocabulary(MACHINE, SURVEYOR), Vocabulary(SURVEYOR, MACHINE)
