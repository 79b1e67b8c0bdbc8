"""The events of an island's rounds: which islands take part, traffic, and the store's silence."""

from types import SimpleNamespace

import pytest

from recycle_pp.config.settings import Islands
from recycle_pp.coordinator.rounds import Rounds
from recycle_pp.protocol.events import Outcome
from recycle_pp.wire.messages.islands import OuterOrder, OuterState, RoundStatistics, StoreTraffic
from recycle_pp.wire.messages.steps import Commit


@pytest.fixture
def job():
    """An island `a`, with the events that it has recorded so far and a function that applies its next round."""
    events = []
    state = SimpleNamespace(
        settings=SimpleNamespace(islands=Islands(name="a", egress_per_gb=0.1)),
        job=SimpleNamespace(outer=SimpleNamespace(state=OuterState()), waits_for_round=False, committed=0),
        recorder=SimpleNamespace(event=events.append),
    )
    rounds, applied = Rounds(state), iter(range(1, 99))

    def apply(*islands):
        number = next(applied)
        dots = {name: {other: 1.0 for other in islands} for name in islands}
        statistics = RoundStatistics(number - 1, dict.fromkeys(islands, 8), 4.0, dots)
        order = OuterOrder(OuterState(number, 10 * number), apply=number)
        commit = Commit(generation=0, step=10 * number, scale=1.0, norm=1.0, loss=2.0, outer=order)
        notes = [
            {"event": "round_computed", "statistics": [statistics]},
            {"event": "committed", "commit": commit},
        ]
        rounds.handled(None, Outcome([], notes))
        return [event for event in events if getattr(event, "round", None) == number - 1]

    return SimpleNamespace(apply=apply, rounds=rounds, events=events)


def names(events):
    return [(event.name(), getattr(event, "island", None)) for event in events]


def test_islands_that_come_and_go_are_recorded_before_the_round(job):
    assert names(job.apply("a", "b")) == [("round_applied", None)], "nothing is known of an earlier round"
    assert names(job.apply("a", "b", "c")) == [("island_joined", "c"), ("round_applied", None)]
    assert names(job.apply("a")) == [("island_left", "b"), ("island_left", "c"), ("round_applied", None)]
    assert names(job.apply("a", "c")) == [("island_joined", "c"), ("round_applied", None)]


def test_a_round_has_its_norm_its_cosine_and_the_price_of_what_was_sent(job):
    job.rounds.traffic(StoreTraffic(sent=2 * 10**9, received=5 * 10**9))
    (applied,) = job.apply("a", "b")
    assert (applied.norm, applied.cosine, applied.dollars) == (2.0, 1.0, 0.2)
    assert applied.traffic() == "2 GB sent for 0.20 dollars, 5 GB received"
    alone = job.apply("a")[-1]
    assert alone.cosine is None and "cosine" not in alone.figures()


def test_a_silent_store_is_recorded_once_and_its_return_too(job):
    for failing in (10.0, 31.0, 50.0):
        job.rounds.traffic(StoreTraffic(sent=0, received=0, failing=failing, detail="no route"))
    job.rounds.traffic(StoreTraffic(sent=1, received=0))
    assert names(job.events) == [("islands_cut_off", None), ("islands_in_touch", None)]
