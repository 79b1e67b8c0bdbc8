"""Records the rounds of an island, and its traffic with the store (`recycle_pp.islands`).

    rounds = Rounds(state)          # a handler of the job's events
    rounds.traffic(message)         # a worker's traffic with the store
    rounds.seen(message)            # the state of all islands, according to the store

The events are round_closed, round_applied, round_awaited, island_joined, island_left, island_late, islands_cut_off and
islands_in_touch. Decides nothing; `protocol.outer_rounds` does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from recycle_pp.protocol.events import Event, Outcome
from recycle_pp.telemetry.events.islands import (
    IslandJoined,
    IslandLate,
    IslandLeft,
    IslandsCutOff,
    IslandsInTouch,
    RoundApplied,
    RoundAwaited,
    RoundClosed,
)
from recycle_pp.wire.messages.islands import IslandsSeen, OuterState, RoundStatistics, StoreTraffic
from recycle_pp.wire.messages.steps import Commit

from .state import JobState

QUIET_SECONDS = 30.0  # how long the store must fail before this is reported


class Rounds:
    def __init__(self, state: JobState) -> None:
        self._state = state
        self._before = OuterState()  # position after the latest event of the job
        self._statistics: dict[int, list[RoundStatistics]] = {}
        self._sent = self._received = 0  # bytes since the latest event round_applied
        self._awaited = -1  # step whose commit waits for a round
        self._cut_off = False
        self._live: set[str] | None = None  # islands; None before the first `seen`
        self._closed = -1  # number of the newest closed round

    def handled(self, event: Event, outcome: Outcome) -> None:
        job = self._state.job
        if job.outer is None:
            return
        for note in outcome.notes:
            if note["event"] == "round_computed":
                for each in note["statistics"]:
                    self._statistics.setdefault(each.round, []).append(each)
            elif note["event"] == "committed":
                self._committed(note["commit"])
        if job.waits_for_round and self._awaited != job.committed:
            self._awaited = job.committed
            steps = job.committed + 1 - job.outer.state.begun
            self._state.recorder.event(RoundAwaited(round=job.outer.state.applied, steps=steps))
        self._before = job.outer.state

    def traffic(self, message: StoreTraffic) -> None:
        self._sent += message.sent
        self._received += message.received
        if message.failing >= QUIET_SECONDS and not self._cut_off:
            self._cut_off = True
            self._state.recorder.event(IslandsCutOff(detail=message.detail, seconds=round(message.failing, 1)))
        elif self._cut_off and not message.detail:
            self._cut_off = False
            self._state.recorder.event(IslandsInTouch())

    def seen(self, message: IslandsSeen) -> None:
        """Records islands that have joined or left, and rounds that were closed, since the previous message."""
        record, before, live = self._state.recorder.event, self._live, set(message.live)
        for name in sorted(live - (before or set()) - {self._state.settings.islands.name}):
            record(IslandJoined(island=name))
        for name in sorted((before or set()) - live):
            record(IslandLeft(island=name, ended=name not in message.silent))
        for number in sorted(number for number in message.closed if number > self._closed):
            shares = message.closed[number]
            record(RoundClosed(round=number, islands=sorted(shares), samples=sum(shares.values())))
            # An island that this message shows for the first time may have joined after the round was closed.
            for name in sorted((before or set()) & live - shares.keys()):
                record(IslandLate(round=number, island=name))
            self._closed = number
        self._live = live

    def _committed(self, commit: Commit) -> None:
        order, before = commit.outer, self._before
        assert order is not None
        if order.apply is None:
            return
        for number in sorted(of for of in self._statistics if of < order.apply):
            self._record(number, self._statistics.pop(number), commit.step, before)

    def _record(self, number: int, found: list[RoundStatistics], step: int, before: OuterState) -> None:
        """step: the step whose commit applies the round. before: the position before that commit"""
        islands, shares = self._state.settings.islands, found[0].shares
        sent = before.sent if number == before.applied else None
        price = islands.egress_per_gb
        self._state.recorder.event(
            RoundApplied(
                round=number,
                islands=sorted(shares),
                samples=sum(shares.values()),
                norm=math.sqrt(sum(each.square for each in found)),
                cosine=cosine(_added(found)),
                late=sent is not None and islands.name not in shares,
                steps=step - before.begun,
                lag_steps=None if sent is None else step + 1 - sent,
                sent_bytes=self._sent,
                received_bytes=self._received,
                dollars=self._sent * price / 1e9 if price else None,
                damaged=[why for each in found for why in each.refused],
            )
        )
        self._sent = self._received = 0


def cosine(dots: Mapping[str, Mapping[str, float]]) -> float | None:
    """Mean cosine over all pairs of islands' deltas; None if fewer than two islands have a delta.

    dots: island -> other island -> dot product of their deltas; each pair once, and each island with itself"""
    found = [
        dot / math.sqrt(dots[name][name] * dots[other][other])
        for name, others in dots.items()
        for other, dot in others.items()
        if name != other and dots[name].get(name) and dots.get(other, {}).get(other)
    ]
    return sum(found) / len(found) if found else None


def _added(found: list[RoundStatistics]) -> dict[str, dict[str, float]]:
    total: dict[str, dict[str, float]] = {}
    for each in found:
        for name, others in each.dots.items():
            for other, dot in others.items():
                of = total.setdefault(name, {})
                of[other] = of.get(other, 0.0) + dot
    return total
