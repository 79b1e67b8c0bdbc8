"""Handles supervisors' reports about hardware: records events, gives throttled workers less work, quarantines GPUs.

    hardware = Hardware(state, deaths)
    hardware.reported(rank, message)        # after each check by a supervisor
    hardware.quarantined                    # UUID -> detail of the GPUs in quarantine.json

The supervisor itself drains or kills its worker. A killed worker counts as dead as soon as the report arrives, because
a GPU driver may delay the end of the process for a long time. Only the coordinator adds to quarantine.json.
"""

from __future__ import annotations

import time
from contextlib import suppress

import msgspec

from recycle_pp.health import quarantine
from recycle_pp.telemetry.events.health import HealthFound, HealthOver
from recycle_pp.telemetry.warn import warn_once
from recycle_pp.wire.files import UnreadableFile
from recycle_pp.wire.messages.health import Finding, Health
from recycle_pp.wire.messages.members import Member
from recycle_pp.wire.records import Device, HealthRecord

from .deaths import Deaths
from .ranks import Rank
from .state import JobState

WRITE_SECONDS = 1.0  # between two versions of health.json

Signal = tuple[str, str]
"""(device, signal) of a `Finding`"""


class Hardware:
    def __init__(self, state: JobState, deaths: Deaths) -> None:
        self._state = state
        self._deaths = deaths
        self._found: dict[Member, dict[Signal, Finding]] = {}
        self._devices: dict[Member, list[Device]] = {}
        self._writing = False
        self.quarantined: dict[str, str] = {}
        state.run.later(self._read)

    def reported(self, rank: Rank, message: Health) -> None:
        state = self._state
        if state.lifecycle.over:
            return
        self._devices[rank.number] = [
            Device(worker=str(rank.role), host=rank.host or "", **msgspec.structs.asdict(reading))
            for reading in message.readings
        ]
        known = self._found.get(rank.number, {})
        found = self._found[rank.number] = {(of.device, of.signal): of for of in message.findings}
        for at, finding in found.items():
            if at not in known or known[at].action != finding.action:
                self._begin(rank, finding)
        for device, signal in known.keys() - found.keys():
            state.recorder.event(HealthOver(worker=str(rank.role), device=device, signal=signal))
        state.profile.throttle({state.roster[number].role: _factor(of) for number, of in self._found.items()})
        if not self._writing:
            self._writing = True
            state.timers.after(WRITE_SECONDS, self._write)

    def _begin(self, rank: Rank, finding: Finding) -> None:
        state = self._state
        state.recorder.event(
            HealthFound(
                worker=str(rank.role),
                host=rank.host,
                device=finding.device,
                signal=finding.signal,
                action=finding.action,
                detail=finding.detail,
                factor=finding.factor,
            )
        )
        if finding.action != "kill":
            return
        if finding.signal != "quarantine":
            entry = quarantine.Entry(
                str(rank.role), rank.host or "", finding.detail, time.time(), state.job.committed + 1
            )
            state.run.later(self._quarantine, finding.device, entry)
        if rank.alive:
            self._deaths.end(rank, "quarantine", f"{finding.device}: {finding.detail}")

    def _quarantine(self, uuid: str, entry: quarantine.Entry) -> None:
        try:
            quarantine.add(self._state.run.quarantine, uuid, entry)
        except (OSError, UnreadableFile) as error:
            warn_once(f"{uuid} is broken ({entry.detail}), but quarantine.json cannot be written: {error}")

    def _write(self) -> None:
        self._writing = False
        connected = [number for number in sorted(self._devices) if self._state.roster[number].supervisor is not None]
        devices = [device for number in connected for device in self._devices[number]]
        record = msgspec.to_builtins(HealthRecord(time=time.time(), devices=devices))
        self._state.run.later(self._state.run.write_json, self._state.run.health, record)
        self._state.run.later(self._read)  # a person may have removed a GPU from quarantine.json

    def _read(self) -> None:
        with suppress(OSError, UnreadableFile):
            self.quarantined = {uuid: of.detail for uuid, of in quarantine.read(self._state.run.quarantine).items()}


def _factor(found: dict[Signal, Finding]) -> float:
    return max((finding.factor for finding in found.values()), default=1.0)
