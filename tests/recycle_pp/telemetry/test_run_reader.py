"""The reader of a run folder, after the run and while it is written."""

from __future__ import annotations

import json

import pytest

from recycle_pp.telemetry.events.deaths import DeathDetected
from recycle_pp.telemetry.events.event import Event
from recycle_pp.telemetry.run_reader import RunReader
from recycle_pp.wire.files import UnreadableFile

from ..drawing.examples import run_folder

DEATH = {"event": "death_detected", "time": 1.0, "step": 1, "generation": 0, "worker": "1.2", "cause": "hang"}
EXPLAINED = DEATH | {"event": "death_explained", "cause": "signal", "detail": "SIGKILL", "injected": False}


@pytest.fixture
def run(tmp_path) -> RunReader:
    return RunReader(tmp_path)


def append(path, *records) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def test_an_empty_folder_has_no_records_and_no_damage(run):
    assert (run.steps(), run.events(), run.traced(), run.summary(), run.profile()) == ([], [], [], None, None)
    lines = run.follow()
    assert (lines.steps.new(), lines.events.new(), lines.damage) == ([], [], [])


def test_a_follower_returns_each_line_once_and_completes_a_line_that_was_cut_short(run):
    lines = run.follow()
    append(run.folder.metrics, {"step": 0, "loss": 2.0}, {"step": 1, "loss": 1.5})
    assert [(line.step, line.loss) for line in lines.steps.new()] == [(0, 2.0), (1, 1.5)]
    with run.folder.metrics.open("a") as file:
        file.write('{"step": 2, "lo')
        file.flush()
        assert lines.steps.new() == []
        file.write('ss": null}\n')
    assert [(line.step, line.loss) for line in lines.steps.new()] == [(2, None)] and lines.steps.new() == []


def test_only_the_newest_line_of_a_step_counts_and_no_line_of_a_replaced_coordinator(run):
    first, second = {"step": 0, "term": 0}, {"step": 1, "term": 0, "loss": 3.0}
    append(run.folder.metrics, first, second, {"step": 1, "term": 1, "loss": 2.0}, {"step": 2, "term": 0})
    assert [(line.step, line.loss) for line in run.steps()] == [(0, None), (1, 2.0)]


def test_a_death_has_the_cause_that_was_found_later(run):
    append(run.folder.events, DEATH, EXPLAINED)
    (death,) = run.events()
    assert isinstance(death, DeathDetected) and (death.cause, death.detail) == ("signal", "SIGKILL")


def test_events_of_another_version_are_plain_events(run):
    append(run.folder.events, DEATH | {"event": "painted"}, {"event": "spawned", "step": 3})
    assert [type(event) for event in run.events()] == [Event, Event]


@pytest.mark.parametrize("line", ['{"step": "one"}', "[1]", "null", "step 1", '{"step": 1, "term": "new"}'])
def test_a_damaged_line_is_an_error_for_a_reader_and_is_skipped_and_named_by_a_follower(run, line):
    run.folder.metrics.write_text(f'{{"step": 0}}\n{line}\n{{"step": 2}}\n')
    with pytest.raises(UnreadableFile, match=r"metrics\.jsonl cannot be read: line 2: "):
        run.steps()
    lines = run.follow()
    assert [step.step for step in lines.steps.new()] == [0, 2] and "line 2: " in str(lines.damage[0])


@pytest.mark.parametrize("line", ['{"step": 1, "lo', '{"step": "one', "\0\0\0", ""])
def test_a_line_cut_off_by_a_crash_is_not_damage(run, line):
    run.folder.metrics.write_text(f'{{"step": 0}}\n{line}\n{{"step": 2}}\n')
    assert [step.step for step in run.steps()] == [0, 2]


def test_the_last_recovery_is_the_last_step_with_a_death(tmp_path):
    run = RunReader(run_folder(tmp_path / "run"))
    assert run.traced() == [19, 20, 21] and run.last_recovery() == 20
    with pytest.raises(ValueError, match="has no trace of step 7; there are 19, 20, 21"):
        run.trace(7)
