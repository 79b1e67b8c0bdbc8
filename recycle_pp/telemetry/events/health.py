"""Hardware faults of workers."""

from __future__ import annotations

from recycle_pp.wire.records import Number

from .event import WorkerEvent

_CONSEQUENCES = {
    "note": "nothing is done",
    "slow": "its peers take over a part of its work",
    "drain": "it leaves after this step",
    "kill": "it is killed, and no worker may start on this GPU (quarantine.json)",
}


class HealthFound(WorkerEvent):
    """The hardware of the worker has a fault ([health](health.md)). `device`: the GPU's UUID, or "host". `host`: its
    node. `signal`: what was seen. `action`: note, slow, drain or kill. `detail`: the evidence. `factor`: for slow, the
    estimated duration of the worker's ops as a multiple of the usual duration."""

    exported = True
    host: str | None
    device: str
    signal: str
    action: str
    detail: str
    factor: Number

    def text(self) -> str:
        where = f"{self.device} on {self.host or 'its node'}" if self.device != "host" else self.host or "its host"
        return f"worker {self.worker}, {where}: {self.detail}; {_CONSEQUENCES.get(self.action, self.action)}"


class HealthOver(WorkerEvent):
    """A fault of the worker's hardware is over. `device`, `signal`: as in `health_found`."""

    exported = True
    device: str
    signal: str

    def text(self) -> str:
        where = f" of {self.device}" if self.device != "host" else ""
        return f"worker {self.worker}: the problem {self.signal}{where} is over"
