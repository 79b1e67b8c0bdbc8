"""Hardware faults that supervisors have reported, as evidence for a verdict.

    lines = faults(launched, worker="1.2")      # the current faults; those of the worker and its host first

A fault that takes work from a worker is always shown. A note, which has no consequences, is shown only if it concerns
the worker of the verdict or that worker's host, because it may then explain the verdict. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from recycle_pp.telemetry.events.event import Event
from recycle_pp.telemetry.events.health import HealthFound, HealthOver
from recycle_pp.telemetry.events.workers import Spawned

MOST = 3  # lines


def faults(events: Sequence[Event], worker: str | None) -> list[str]:
    """Sentences about the current faults, at most MOST.

    events: the events of the newest start of the run
    worker: the worker of the verdict; None if the verdict names no worker
    """
    hosts = {event.worker: event.host for event in events if isinstance(event, Spawned)}
    lasting: dict[tuple[str | None, str, str], HealthFound] = {}
    for event in events:
        match event:
            case HealthFound():
                lasting[event.worker, event.device, event.signal] = event
            case HealthOver():
                lasting.pop((event.worker, event.device, event.signal), None)
            case _:
                pass

    def near(fault: HealthFound) -> bool:
        same_host = fault.device == "host" and fault.host is not None and fault.host == hosts.get(worker or "")
        return fault.worker == worker or same_host

    shown = [fault for fault in lasting.values() if fault.action != "note" or near(fault)]
    shown.sort(key=lambda fault: (not near(fault), -fault.time))
    return [f"hardware: {fault.text()}" for fault in shown[:MOST]]
