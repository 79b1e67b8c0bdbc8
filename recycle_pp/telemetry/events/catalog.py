"""All events, and the reader of their lines.

EVENTS["respawned"]                              # the class Respawned
parse({"event": "respawned", "step": 20, ...})   # Respawned(...)
"""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from recycle_pp.wire.records import Count

from . import checkpoints, control, coordinators, deaths, health, islands, job, layers, recovery, understudies, workers
from .event import Event

EVENTS: dict[str, type[Event]] = {
    cls.name(): cls
    for module in (
        job,
        workers,
        deaths,
        health,
        recovery,
        understudies,
        layers,
        checkpoints,
        islands,
        coordinators,
        control,
    )
    for cls in vars(module).values()
    if isinstance(cls, type) and issubclass(cls, Event) and cls.__module__ == module.__name__
}
"""The classes of events by name, in the order of docs/run-folder.md."""


class _Line(msgspec.Struct):
    """The keys of every line."""

    event: str
    step: Count


def parse(record: Any) -> Event:
    """The event of a line. A plain `Event` if a different version wrote it, with an unknown name or missing fields.

    Raises:
        msgspec.ValidationError: the record is not an event, or a field has the wrong type.
    """
    cls = EVENTS.get(msgspec.convert(record, _Line).event, Event)
    return msgspec.convert(record, cls if _required(cls) <= record.keys() else Event)


@cache
def _required(cls: type[Event]) -> frozenset[str]:
    return frozenset(field.name for field in msgspec.structs.fields(cls) if field.required)
