"""The figures of an island in `status`, `report` and exporters."""

import json
import urllib.request

import pytest

from recycle_pp.config.loading import load
from recycle_pp.status import main as status
from recycle_pp.telemetry.events.coordinators import CoordinatorElected
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
from recycle_pp.telemetry.events.job import Finished, Started
from recycle_pp.telemetry.exporters.exporter import make
from recycle_pp.telemetry.island_figures import IslandRounds, in_words
from recycle_pp.telemetry.report import report
from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.testing.ports import free_ports


def applied(number, **changes):
    of = {
        "round": number, "islands": ["a", "b"], "samples": 40, "norm": 0.25, "cosine": 0.5, "late": False, "steps": 10,
        "lag_steps": 2, "sent_bytes": 3_000_000, "received_bytes": 12_000_000, "dollars": 0.0125, "damaged": [],
    }  # fmt: skip
    return RoundApplied(step=10 * number + 11, **of | changes)


def closed(number):
    return RoundClosed(round=number, islands=["a", "b"], samples=40)


EVENTS = [
    Started(workers=1), IslandJoined(island="b"), IslandJoined(island="c"), closed(0), applied(0), IslandLeft(
        island="c", ended=True
    ), closed(1), applied(1), closed(2), IslandLate(island="a", round=2), IslandLate(island="b", round=2),
]  # fmt: skip


def followed(events, name="a"):
    rounds = IslandRounds(name)
    for event in events:
        rounds.follow(event)
    return rounds.figures()


def test_the_figures_are_the_newest_state_and_totals_of_the_traffic():
    figures = followed(EVENTS)
    assert (figures.rounds, figures.behind, figures.live, figures.late) == (2, 1, ["a", "b"], 1)
    assert (figures.sent_bytes, figures.received_bytes, figures.dollars) == (6_000_000, 24_000_000, 0.025)
    assert in_words(figures) == [
        "island a: 2 rounds applied, 1 behind, 1 delta too late; live: a, b",
        "newest round, of a, b: norm 0.25, cosine 0.50, used 2 steps after its delta",
        "traffic with the store: 6 MB sent, 0.025 dollars, 24 MB received",
    ]


def test_a_job_by_itself_has_no_figures_and_an_island_without_a_price_no_dollars():
    assert followed([Started(workers=1), Finished()]) is None
    assert "dollars" not in "".join(in_words(followed([applied(0, dollars=None)])))


def test_islands_that_left_during_a_change_of_coordinators_do_not_stay():
    assert followed([*EVENTS, CoordinatorElected(rank=1, seconds=0.1), IslandJoined(island="d")]).live == ["a", "d"]


def test_the_problem_is_shown_while_it_lasts():
    waits, away = RoundAwaited(round=2, steps=20), IslandsCutOff(detail="refused", seconds=40.0)
    assert followed([waits, away]).problem == f"{waits.text()}; {away.text()}"
    assert followed([waits, away, IslandsInTouch()]).problem == waits.text()
    assert followed([waits, away, IslandsInTouch(), applied(2)]).problem is None


@pytest.fixture
def run(tmp_path):
    islands = {"store": "/store", "name": "a"}
    run = RunFolder.create(load({"run": {"dir": str(tmp_path / "run")}, "islands": islands}))
    run.events.write_text("".join(json.dumps(event.line()) + "\n" for event in EVENTS))
    run.metrics.write_text('{"step": 30, "loss": 1.0}\n')
    return run


def test_status_and_report_show_the_figures(run, capsys):
    lines = in_words(followed(EVENTS))
    status([str(run.path)])
    shown = capsys.readouterr().out.splitlines()
    assert [line for line in shown if line in lines] == lines
    status([str(run.path), "--json"])
    found = json.loads(capsys.readouterr().out)["islands"]
    assert (found["rounds"], found["live"], found["dollars"]) == (2, ["a", "b"], 0.025)
    assert [line.strip() for line in report(run).splitlines() if line.strip() in lines] == lines


def test_prometheus_has_the_state_as_gauges_and_the_traffic_as_counters(run):
    pytest.importorskip("prometheus_client")
    port = free_ports()
    exporter = make("prometheus", run, str(port))

    def shown():
        text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
        lines = [line for line in text.splitlines() if line.startswith("recycle_islands_") and "_created" not in line]
        return {line.split("{")[0].removeprefix("recycle_islands_"): float(line.split()[-1]) for line in lines}

    try:
        assert shown() == {}
        for event in EVENTS:
            exporter.event(event.line())
        expected = {"rounds": 2, "behind": 1, "live": 2, "islands": 2, "lag_steps": 2, "norm": 0.25, "cosine": 0.5}
        totals = {"sent_bytes_total": 6e6, "received_bytes_total": 24e6, "dollars_total": 0.025}
        assert shown() == expected | totals
        exporter.event(applied(2, islands=["a"], cosine=None, dollars=None).line())
        assert "cosine" not in shown() and shown()["behind"] == 0 and shown()["sent_bytes_total"] == 9e6
    finally:
        exporter.close()


def test_tensorboard_has_a_point_for_every_round(run):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    exporter = make("tensorboard", run)
    for event in EVENTS:
        exporter.event(event.line())
    exporter.close()
    board = EventAccumulator(str(run.path / "tensorboard"))
    board.Reload()
    curves = {tag: [(e.step, e.value) for e in board.Scalars(tag)] for tag in board.Tags()["scalars"]}
    assert curves["islands/rounds"] == [(11, 1.0), (21, 2.0)] and curves["islands/live"] == [(11, 3.0), (21, 2.0)]
    assert curves["islands/sent_bytes"] == [(11, 3e6), (21, 3e6)] and curves["islands/cosine"] == [(11, 0.5), (21, 0.5)]
    assert curves["islands/dollars"][0][1] == pytest.approx(0.0125)
