"""The lines of several coordinators in one folder are told apart by their terms."""

import json

import pytest

from recycle_pp.config.loading import load
from recycle_pp.telemetry.background import Background
from recycle_pp.telemetry.event_log import EventLog
from recycle_pp.telemetry.events.job import Started
from recycle_pp.telemetry.follower import Follower
from recycle_pp.telemetry.heartbeat import Heartbeat, Sign
from recycle_pp.telemetry.history import History
from recycle_pp.telemetry.lines import Lines
from recycle_pp.telemetry.report import report
from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.telemetry.status import StatusReader


@pytest.fixture
def run(tmp_path):
    return RunFolder.create(load({"run": {"dir": str(tmp_path / "run")}}))


def write(path, *lines):
    with path.open("a") as file:
        for term, step, *more in lines:
            record = {"event": "left", "step": step, "loss": 1.0, "cpu_seconds": 1.0} | (more[0] if more else {})
            file.write(json.dumps(record | ({} if term is None else {"term": term})) + "\n")


def again(run, done=0):
    """Starts the next job in that folder. Returns its run folder."""
    run.unlock()
    return RunFolder.create(load({"run": {"dir": str(run.path), "resume": done > 0}}), done=done, may_restart=True)


def test_a_line_has_the_term_at_the_time_when_it_is_written_to_the_disk(tmp_path):
    later, term = Background("test"), 3
    later.permitted = lambda: term == 4  # a lease that was renewed in a later term
    lines = Lines(tmp_path / "metrics.jsonl", later, lambda: term)
    term = 4
    lines.write({"step": 0})
    assert later.flush(10.0)
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 0, "term": 4}


def test_a_step_before_a_cut_gets_no_second_line(tmp_path):
    lines = Lines(tmp_path / "metrics.jsonl", term=lambda: 1)
    write(tmp_path / "metrics.jsonl", (0, 0), (0, 1), (0, 2))
    lines.cut(2)
    for step in (1, 2):
        lines.write({"step": step})
    lines.close()
    assert [(r["step"], r["term"]) for r in Follower(tmp_path / "metrics.jsonl").new()] == [(0, 0), (1, 0), (2, 1)]


def test_a_follower_skips_lines_of_an_older_coordinator_behind_those_of_a_newer_one(tmp_path):
    path = tmp_path / "events.jsonl"
    write(path, (None, 0), (0, 1))
    follower, late = Follower(path), Follower(path, skip=path.stat().st_size)
    assert [line["step"] for line in follower.new()] == [0, 1]
    write(path, (1, 1), (0, 2), (None, 3))
    assert [line["step"] for line in follower.new()] == [1] == [line["step"] for line in late.new()]
    write(path, (0, 2), (1, 2))
    assert [line["step"] for line in follower.new()] == [2] == [line["step"] for line in late.new()]


def test_a_reader_gets_one_line_per_step_even_if_two_coordinators_have_written(run):
    write(run.metrics, (0, 8), (0, 9), (0, 10), (0, 11), (1, 10, {"loss": 2.0}), (0, 12), (1, 11))
    assert [(line["step"], line["term"]) for line in run.lines(run.metrics)] == [(8, 0), (9, 0), (10, 1), (11, 1)]
    assert History.read(run).step == 11 and len(History.read(run).cpu_steps) == 4


def test_events_of_a_coordinator_without_majority_do_not_count(run):
    write(run.metrics, (0, 9), (1, 10))
    event = {"time": 1.0, "generation": 0, "worker": "1.0", "cause": "node_loss"}
    write(run.events, (0, 0, event | {"event": "started"}), (1, 10, event | {"event": "coordinator_elected"}))
    before, status = report(run), StatusReader(run).read()
    write(run.events, (0, 10, event | {"event": "death_detected"}), (0, 10, event | {"event": "stopped"}))
    assert report(run) == before and "no worker died" in before
    assert StatusReader(run).read().deaths == 0 and StatusReader(run).read().state == status.state
    assert History.read(run).dead == frozenset()


@pytest.mark.parametrize("file", ["metrics", "samples", "events"])
def test_the_next_job_in_a_folder_writes_newer_terms(run, file):
    assert run.first_term == 0
    write(getattr(run, file), (4, 0), (2, 1))
    assert again(run).first_term == 5


def test_a_job_that_continues_a_checkpoint_writes_newer_terms_even_without_the_lines_of_the_killed_job(run):
    """Only the checkpoint and config.yaml had reached the store when the job was killed."""
    assert again(run, done=2).first_term == 1


def test_lines_of_an_earlier_version_are_older_than_every_term(run):
    write(run.metrics, (None, 0), (None, 1), (None, 2), (None, 1))
    resumed = again(run, done=2)
    assert resumed.first_term == 1
    write(run.metrics, (1, 2), (None, 3))
    assert [line["step"] for line in resumed.lines(resumed.metrics)] == [0, 1, 2]


def test_the_heartbeat_of_an_older_coordinator_does_not_replace_a_newer_one(run):
    Heartbeat(run, lambda: 7, "127.0.0.1:7").write([])
    Heartbeat(run, lambda: 6, "127.0.0.1:6").end([], 1)
    assert Sign.read(run).address == "127.0.0.1:7" and not Sign.read(run).over
    Heartbeat(run, lambda: 8, "127.0.0.1:8").write([])
    assert Sign.read(run).address == "127.0.0.1:8"
    assert again(run).first_term == 9


def test_events_have_the_term(run):
    events = EventLog(run.events, steps=3, term=lambda: 5)
    events.record(Started(workers=2))
    events.close()
    assert [event["term"] for event in run.lines(run.events)] == [5]
