"""Records the rounds of an island, and its traffic with the store (`recycle_pp.islands`).

    rounds = Rounds(state)          # a handler of the job's events
    rounds.traffic(message)         # a worker's traffic with the store

The events are round_applied, round_awaited, islands_cut_off and islands_in_touch. Decides nothing;
`protocol.outer_rounds` does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from recycle_pp.protocol.events import Event, Outcome
from recycle_pp.telemetry.events.islands import IslandsCutOff, IslandsInTouch, RoundApplied, RoundAwaited
from recycle_pp.wire.messages.islands import OuterState, RoundStatistics, StoreTraffic
from recycle_pp.wire.messages.steps import Commit

from .state import JobState

QUIET_SECONDS = 30.0  # silence of the store until it is reported


class Rounds:
    def __init__(self, state: JobState) -> None:
        self._state = state
        self._before = OuterState()  # position before the latest commit
        self._statistics: dict[int, list[RoundStatistics]] = {}
        self._sent = self._received = 0  # bytes
        self._awaited = -1  # step whose commit waits for a round
        self._cut_off = False

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

    def traffic(self, message: StoreTraffic) -> None:
        self._sent += message.sent
        self._received += message.received
        if message.failing >= QUIET_SECONDS and not self._cut_off:
            self._cut_off = True
            self._state.recorder.event(IslandsCutOff(detail=message.detail, seconds=round(message.failing, 1)))
        elif self._cut_off and not message.detail:
            self._cut_off = False
            self._state.recorder.event(IslandsInTouch())

    def _committed(self, commit: Commit) -> None:
        order, before = commit.outer, self._before
        assert order is not None
        self._before = order.state
        if order.apply is None:
            return
        for number in sorted(of for of in self._statistics if of < order.apply):
            self._record(number, self._statistics.pop(number), commit.step - before.begun, before)

    def _record(self, number: int, found: list[RoundStatistics], steps: int, before: OuterState) -> None:
        islands, shares = self._state.settings.islands, found[0].shares
        sent = number == before.applied and before.sent is not None
        self._state.recorder.event(
            RoundApplied(
                round=number,
                islands=sorted(shares),
                samples=sum(shares.values()),
                norm=math.sqrt(sum(each.square for each in found)),
                cosine=cosine(_added(found)),
                late=sent and islands.name not in shares,
                steps=steps,
                sent_bytes=self._sent,
                received_bytes=self._received,
                dollars=round(self._sent * islands.egress_per_gb / 1e9, 6),
                damaged=[why for each in found for why in each.refused],
            )
        )


def cosine(dots: Mapping[str, Mapping[str, float]]) -> float | None:
    """Mean cosine between the deltas of two islands; None if there are no two islands with a delta.

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
