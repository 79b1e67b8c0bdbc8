"""The records of an island's rounds."""

import pytest

from recycle_pp.config.settings import Settings
from recycle_pp.coordinator.job import new_job
from recycle_pp.coordinator.rounds import Rounds
from recycle_pp.protocol.events import Outcome
from recycle_pp.wire.messages.islands import IslandsSeen, OuterOrder, OuterState, RoundStatistics, StoreTraffic
from recycle_pp.wire.messages.steps import Commit

from .states import job_state

STATISTICS = RoundStatistics(0, {"a": 30, "b": 10}, 4.0, {"a": {"a": 4.0, "b": 3.0}, "b": {"b": 9.0}})


class Recorded:
    """`Rounds` of island a, without a job: the position is set before each commit."""

    def __init__(self, **changes):
        settings = Settings().with_values(
            {"islands.store": "/store", "islands.name": "a", "islands.steps": 10} | changes
        )
        self.state = job_state(job=new_job(settings, 0))
        self.state.settings = settings
        self.rounds = Rounds(self.state)

    def at(self, state):
        self.state.job.outer.state = state
        self.rounds.handled(None, Outcome([], []))

    def commits(self, step, order, statistics=(STATISTICS,)):
        self.state.job.outer.state = order.state
        notes = [{"event": "round_computed", "statistics": list(statistics)}]
        commit = Commit(generation=0, step=step, scale=1.0, norm=1.0, loss=1.0, outer=order)
        notes.append({"event": "committed", "commit": commit})
        self.rounds.handled(None, Outcome([], notes))

    def sees(self, live, closed=None, silent=()):
        before = len(self.state.recorder.whole)
        self.rounds.seen(IslandsSeen(live, list(silent), closed or {}))
        return [event.text() for event in self.state.recorder.whole[before:]]


def test_a_round_is_recorded_with_its_lag_and_the_traffic_since_the_previous_one():
    island = Recorded(**{"islands.egress_per_gb": 0.5})
    island.at(OuterState(applied=0, begun=0, sent=10))
    for number in (0, 1):
        island.rounds.traffic(StoreTraffic(2_000_000, 300))
        island.rounds.traffic(StoreTraffic(2_000_000, 0))
        order = OuterOrder(OuterState(applied=number + 1, begun=10 * (number + 1)), apply=number + 1)
        statistics = RoundStatistics(number, STATISTICS.shares, STATISTICS.square, STATISTICS.dots)
        island.commits(12 + 10 * number, order, [statistics])
    first, second = island.state.recorder.whole
    assert (first.round, first.steps, first.lag_steps, first.late, first.samples) == (0, 12, 3, False, 40)
    assert (first.norm, first.cosine) == (2.0, pytest.approx(0.5))
    assert (second.round, second.steps, second.lag_steps) == (1, 12, None), "no delta was cut in this round"
    assert [(e.sent_bytes, e.received_bytes) for e in (first, second)] == [(4_000_000, 300)] * 2
    assert first.dollars == pytest.approx(0.002)


def test_without_a_price_there_are_no_dollars():
    island = Recorded()
    island.commits(10, OuterOrder(OuterState(applied=1, begun=10), apply=1))
    assert island.state.recorder.whole[0].dollars is None


def test_islands_that_join_leave_end_and_are_late_are_recorded_once():
    island = Recorded()
    assert island.sees(["a", "b"]) == ["island b takes part in the rounds"]
    assert island.sees(["a", "b"], {0: {"a": 1, "b": 1}}) == ["round 0 is closed, with a, b"]
    assert island.sees(["a", "b"], {0: {"a": 1, "b": 1}}) == []
    assert island.sees(["a", "b"], {1: {"a": 1}}) == [
        "round 1 is closed, with a",
        "island b is late: round 1 was closed without its delta",
    ]
    assert island.sees(["a"], silent=["b"]) == ["island b has left the rounds: its lease in the store was not renewed"]
    assert island.sees(["a", "b", "c"]) == [f"island {name} takes part in the rounds" for name in "bc"]
    assert island.sees(["a", "b"]) == ["island c has left the rounds: its job has ended"]


def test_an_island_that_has_just_joined_is_not_late():
    island = Recorded()
    assert not any("late" in text for text in island.sees(["a", "b"], {0: {"a": 1}, 1: {"a": 1}}))
    assert not any("late" in text for text in island.sees(["a", "b", "c"], {2: {"a": 1, "b": 1}}))
    assert island.sees(["a", "b", "c"], {3: {"b": 1, "c": 1}})[-1].startswith("island a is late")
