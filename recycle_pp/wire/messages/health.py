"""A supervisor's report about the hardware of its worker."""

from __future__ import annotations

from typing import Literal

import msgspec

from .table import COORDINATOR, SUPERVISOR, Message, sent

Action = Literal["note", "slow", "drain", "kill"]


class Finding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A problem of a device, and the action against it.

    device  the GPU's UUID, or "host"
    signal  recovery | xid | ecc | remap | throttle | lost | nvlink | nic | temperature | disk | quarantine | nvml;
            outside of jobs also "exercise", "dcgmi", or the name of an exercise
    action  note: none. slow: the planner gives the worker less work. drain: the worker leaves at the next commit.
            kill: the worker is killed, and none starts on this GPU before a person lifts its quarantine
    detail  the evidence, in words
    factor  for slow: estimated duration of the worker's ops, as a multiple of their usual duration
    """

    device: str
    signal: str
    action: Action
    detail: str
    factor: float = 1.0


class Reading(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Values read from a device in the newest check. A value is None if it is unknown."""

    device: str
    temperature: float | None = None  # degrees Celsius
    power: float | None = None  # watts
    clock: float | None = None  # MHz: of the GPU's multiprocessors, or the mean of the host's cores
    uncorrected: int | None = None  # memory errors since the driver was loaded, or since the boot
    corrected: int | None = None


@sent(SUPERVISOR, COORDINATOR)
class Health(Message, frozen=True):
    """The result of a check of the hardware. Sent after every check, so that a new coordinator receives it too.

    readings  one for each device
    findings  all present problems
    """

    readings: list[Reading]
    findings: list[Finding]
