"""Writes events to events.jsonl and prints their sentences, in the order in which they happened.

log = EventLog(run.events, steps=60, say=progress.say)
log.record(Spawned(step=20, generation=1, worker="1.2", rank=5, pid=4711, host="node-1"))
death = log.expect(DeathDetected(step=20, generation=1, worker="1.2"))
log.record(Resumed(...))                         # waits for `complete`, so a reader sees each cause before its effects
log.complete(death, cause="signal", detail="SIGKILL", injected=False)         # writes the death, then `Resumed`
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from .background import Later, now
from .events.event import Event
from .in_order import InOrder, Place
from .lines import Lines
from .unwritten import Unwritten


@dataclass
class Expected:
    """An event of which some fields, such as the cause of a death, are not known yet."""

    event: Event
    place: Place

    @property
    def complete(self) -> bool:
        """Whether all fields are known. The event is then written, or waits only for earlier events."""
        return not self.place.open


class EventLog:
    """Writes and prints events in order. While an expected event is incomplete, all later events wait. For use in one
    thread."""

    def __init__(
        self,
        path: Path,
        steps: int,
        say: Callable[[str], None] = lambda sentence: None,
        later: Later = now,
        term: Callable[[], int] = lambda: 0,
    ):
        """
        steps: length of the whole run
        say:   called with the sentence of each printed event
        later, term: see `Lines`
        """
        self.term = term
        self._steps = steps
        self._say = say
        self.unwritten = Unwritten()  # lines of all files of the run folder that are not on the disk
        self._lines = Lines(path, later, term, self.unwritten)
        self._order = InOrder()

    def record(self, event: Event) -> None:
        self._order(self._write, event)

    def expect(self, event: Event) -> Expected:
        """Reserves the event's place in the order until `complete`. `release` writes an incomplete event as it is."""
        place = self._order.reserve(lambda: self._write(expected.event))
        expected = Expected(event, place)
        return expected

    def complete(self, expected: Expected, **fields: Any) -> None:
        """Sets fields of an expected event, and writes it and the events that waited for it."""
        expected.event = msgspec.structs.replace(expected.event, **fields)
        self._order.settle(expected.place)

    def then(self, function: Callable[..., object], *arguments: Any) -> None:
        """Calls the function once all events so far are written."""
        self._order(function, *arguments)

    def release(self) -> None:
        """Writes all events that wait, as they are."""
        self._order.release()

    def restore(self, kept: Unwritten) -> None:
        """Writes the events that a lost coordinator could not write."""
        self._lines.restore(kept)

    def retry(self) -> None:
        """Retries the lines that the disk has rejected."""
        self._lines.retry()

    def close(self) -> None:
        """Closes the file. Events that still wait for the cause of a death are not written."""
        self._lines.close()

    def _write(self, event: Event) -> None:
        self._lines.write(event.line())
        if event.printed:
            self._say(event.sentence(self._steps))
