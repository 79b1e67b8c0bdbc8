"""The figures of an island, from the events of its run. `status`, `report` and exporters use them.

    rounds = IslandRounds("oregon")
    rounds.follow(event)                    # each event of the run, in order
    figures = rounds.figures()              # None before the first event of an island
    figures.gauges()                        # {"rounds": 12, "live": 2, "norm": 0.13, ...}, for curves
    in_words(figures)                       # lines of text

Totals of bytes and dollars include the traffic up to the newest `round_applied`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from recycle_pp.config.sizes import format_size

from .events.coordinators import CoordinatorElected
from .events.event import Event
from .events.islands import (
    IslandJoined,
    IslandLate,
    IslandLeft,
    IslandsCutOff,
    IslandsInTouch,
    RoundApplied,
    RoundAwaited,
    RoundClosed,
)
from .events.job import Started
from .words import plural

GAUGES = {
    "rounds": "rounds that this island has applied",
    "behind": "closed rounds that this island has not applied yet",
    "live": "live islands, including this one",
    "islands": "islands in the newest applied round",
    "lag_steps": "steps from the delta of this island to the use of the result",
    "norm": "norm of the mean delta of the newest applied round",
    "cosine": "mean cosine between the deltas of two islands in the newest applied round",
}
"""Key of `Figures` -> its meaning. These figures are states, so exporters show their newest value."""


@dataclass(frozen=True)
class Figures:
    """The state of an island. The keys of GAUGES are explained there; None: not known yet.

    live            names of the live islands, including this one
    islands         names of the islands in the newest applied round
    late            number of deltas of this island that came too late for their round
    sent_bytes      sent to the store since the run began
    received_bytes  received from the store since the run began
    dollars         price of `sent_bytes`; None without islands.egress_per_gb
    problem         why the island waits for a round, or cannot reach the store; None if it can continue
    """

    name: str
    rounds: int
    behind: int
    live: list[str]
    islands: list[str]
    lag_steps: int | None
    norm: float | None
    cosine: float | None
    late: int
    sent_bytes: int
    received_bytes: int
    dollars: float | None
    problem: str | None

    def gauges(self) -> dict[str, float]:
        """The known values of GAUGES as numbers."""
        values = {key: getattr(self, key) for key in GAUGES}
        numbers = {key: len(of) if isinstance(of, list) else of for key, of in values.items()}
        return {key: of for key, of in numbers.items() if of is not None}


class IslandRounds:
    """Computes the figures of an island from its events.

    name: islands.name; needed only for `Figures.name`, `late` and `live`
    """

    def __init__(self, name: str = "") -> None:
        self._name = name
        self._others: set[str] = set()
        self._closed = self._late = self._sent = self._received = 0
        self._dollars: float | None = None
        self._newest: RoundApplied | None = None
        self._cut_off: IslandsCutOff | None = None
        self._awaited: RoundAwaited | None = None
        self._any = False

    def follow(self, event: Event) -> bool:
        """Takes an event into account. Returns whether it changes the figures."""
        match event:
            case Started() | CoordinatorElected():  # each coordinator records all live islands again when it begins
                self._others.clear()
                self._cut_off = self._awaited = None
                return False
            case IslandJoined(island=island):
                self._others.add(island)
            case IslandLeft(island=island):
                self._others.discard(island)
            case IslandLate(island=island):
                self._late += island == self._name
            case RoundClosed(round=number):
                self._closed = max(self._closed, number + 1)
            case RoundApplied():
                self._newest, self._awaited = event, None
                self._closed = max(self._closed, event.round + 1)
                self._sent += event.sent_bytes
                self._received += event.received_bytes
                if event.dollars is not None:
                    self._dollars = (self._dollars or 0.0) + event.dollars
            case RoundAwaited():
                self._awaited = event
            case IslandsCutOff():
                self._cut_off = event
            case IslandsInTouch():
                self._cut_off = None
            case _:
                return False
        self._any = True
        return True

    def figures(self) -> Figures | None:
        """The current figures; None before the first event about islands, and so always for a job without islands."""
        if not self._any:
            return None
        newest, problems = self._newest, [of for of in (self._awaited, self._cut_off) if of is not None]
        rounds = 0 if newest is None else newest.round + 1
        return Figures(
            name=self._name,
            rounds=rounds,
            behind=max(0, self._closed - rounds),
            live=sorted({*self._others, self._name}),
            islands=[] if newest is None else newest.islands,
            lag_steps=None if newest is None else newest.lag_steps,
            norm=None if newest is None else newest.norm,
            cosine=None if newest is None else newest.cosine,
            late=self._late,
            sent_bytes=self._sent,
            received_bytes=self._received,
            dollars=self._dollars,
            problem="; ".join(of.text() for of in problems) or None,
        )


def traffic(event: RoundApplied) -> Mapping[str, float]:
    """The bytes and the dollars of one round, by name. Exporters add them up, or show a point for each round."""
    of = {"sent_bytes": event.sent_bytes, "received_bytes": event.received_bytes}
    return of if event.dollars is None else {**of, "dollars": event.dollars}


def in_words(figures: Figures) -> list[str]:
    """The figures as lines of text."""
    behind = f", {figures.behind} behind" if figures.behind else ""
    late = f", {plural(figures.late, 'delta')} too late" if figures.late else ""
    lines = [f"island {figures.name}: {plural(figures.rounds, 'round')} applied{behind}{late}; live: "]
    lines[0] += ", ".join(figures.live)
    if figures.norm is not None:
        cosine = "" if figures.cosine is None else f", cosine {figures.cosine:.2f}"
        lag = "" if figures.lag_steps is None else f", used {plural(figures.lag_steps, 'step')} after its delta"
        lines.append(f"newest round, of {', '.join(figures.islands)}: norm {figures.norm:.3g}{cosine}{lag}")
    price = "" if figures.dollars is None else f", {figures.dollars:,.4g} dollars"
    sent, received = format_size(figures.sent_bytes), format_size(figures.received_bytes)
    lines.append(f"traffic with the store: {sent} sent{price}, {received} received")
    return lines + ([] if figures.problem is None else [figures.problem])
