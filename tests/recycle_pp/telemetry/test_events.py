"""Events and metrics on disk, and in words."""

import json
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recycle_schedules import Worker

from recycle_pp.telemetry.events import _WORDS, Events, Lines, _reports, describe, explained
from recycle_pp.telemetry.follower import Follower


def test_an_event_is_on_disk_as_soon_as_it_is_recorded(tmp_path):
    said = []
    events = Events(tmp_path / "events.jsonl", 60, said.append)
    events.record("death_detected", step=20, generation=3, worker=Worker(1, 2), cause="signal", detail="SIGKILL")
    events.record("plan_adopted", step=20, generation=4, makespan=1.5)
    first, second = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert {"event", "time", "step", "generation", "worker"} <= first.keys() & second.keys()
    assert (first["event"], first["step"], first["generation"], first["worker"]) == ("death_detected", 20, 3, "1.2")
    assert (second["worker"], second["makespan"]) == (None, 1.5)
    assert said == ["step 20: worker 1.2 died (killed by SIGKILL)"]
    events.close()


def test_events_and_sentences_after_an_expected_event_wait_for_it(tmp_path):
    path, said = tmp_path / "events.jsonl", []
    events = Events(path, 60, said.append)

    def names():
        return [json.loads(line)["event"] for line in path.read_text().splitlines()]

    death = events.expect("death_detected", step=20, generation=3, worker="1.2", cause="unknown")
    events.record("resumed", step=20, generation=4, stall_seconds=0.1)
    events.then(said.append, "step 20")
    assert names() == [] and said == [] and not death.complete
    events.complete(death, cause="signal", detail="SIGKILL")
    assert names() == ["death_detected", "resumed"] and death.complete
    assert [sentence.split()[2] for sentence in said[:2]] == ["worker", "training"] and said[2:] == ["step 20"]
    first, second = map(json.loads, path.read_text().splitlines())
    assert first["time"] <= second["time"] and (first["cause"], first["generation"]) == ("signal", 3)
    events.expect("death_detected", step=21, generation=4, worker="1.1", cause="unknown")
    events.record("stopped", step=21, generation=4, reason="no worker is left")
    events.release()
    assert names()[2:] == ["death_detected", "stopped"]
    events.close()


def test_the_cause_of_a_death_that_is_known_late_replaces_the_supposed_one():
    death = {"event": "death_detected", "worker": "1.1", "step": 3, "cause": "unknown", "detail": "?"}
    late = {"event": "death_explained", "worker": "1.1", "cause": "signal", "detail": "SIGKILL", "injected": True}
    other = {**death, "worker": "0.1"}
    first, second, resumed = explained([death, other, {"event": "resumed", "worker": None}, late])
    assert first == {**death, "cause": "signal", "detail": "SIGKILL", "injected": True}
    assert second == other and resumed["event"] == "resumed"


@pytest.mark.parametrize(
    ("details", "sentence"),
    [
        ({"cause": "signal", "detail": "SIGKILL", "injected": True}, "killed by SIGKILL, a rehearsed failure"),
        ({"cause": "exception", "detail": "Traceback ...\nValueError: no such token\n"}, "ValueError: no such token"),
        ({"cause": "out_of_memory", "detail": "SIGKILL by the kernel"}, "out of memory"),
        ({"cause": "hang", "detail": "F of micro-batch 1.3 in step 20, for 10.2 s"}, "stuck in F of micro-batch 1.3"),
        ({"cause": "node_loss", "detail": "its supervisor is gone"}, "its node is lost"),
        ({"cause": "exit", "detail": "exit code 7"}, "it ended by itself: exit code 7"),
        ({"cause": "something new", "detail": "x"}, "something new x"),
        ({}, "died"),
    ],
)
def test_causes_are_told_in_words(details, sentence):
    event = {"event": "death_detected", "step": 20, "worker": "1.2", **details}
    assert sentence in describe(event, 60)


@pytest.mark.parametrize("event", sorted(_WORDS))
def test_every_sentence_can_do_without_details(event):
    sentence = describe({"event": event, "step": 3, "generation": 1, "worker": "0.1", "time": 0.0}, 60)
    assert sentence.startswith("step 3: ")


@pytest.mark.parametrize("event", sorted(_WORDS))
@pytest.mark.parametrize("count", [0, 1, 2])
def test_plurals_are_right_and_the_first_step_is_step_0(event, count):
    numbers = dict.fromkeys(("workers", "lost_ops", "redone_ops", "respawns"), count)
    sentence = describe({"event": event, "step": 0, "generation": 0, "worker": "0.1", "time": 0.0, **numbers}, 60)
    assert not re.search(r"\b1 (ops|restarts|steps|workers)\b|\b[02] (op|restart|step|worker)\b", sentence)
    assert sentence.startswith("step 0: ")


def test_a_worker_that_may_not_be_started_again_has_not_died_again():
    event = {"event": "given_up", "step": 3, "worker": "1.1"}
    assert describe(event | {"respawns": 0}, 60) == "step 3: worker 1.1 is given up: run.respawns allows it no restart"
    assert "died again after 1 restart;" in describe(event | {"respawns": 1}, 60)


def test_no_sentence_names_a_step_that_the_run_does_not_have():
    event = {"event": "checkpoint_saved", "generation": 0, "worker": None, "time": 0.0}
    assert describe(event | {"step": 59, "checkpoint": 59}, 60) == "step 59: checkpoint step-000059 saved"
    assert describe(event | {"step": 60, "checkpoint": 60}, 60) == "after step 59: checkpoint step-000060 saved"


@given(st.floats())
def test_lines_are_json_whatever_number_they_hold(value):
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        lines = Lines(Path(folder) / "metrics.jsonl")
        lines.write({"step": 0, "loss": value, "list": [value, {"deep": value}]})
        lines.close()
        text = (Path(folder) / "metrics.jsonl").read_text()
    record = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    expected = value if math.isfinite(value) else None
    assert record == {"step": 0, "loss": expected, "list": [expected, {"deep": expected}], "term": 0}


def test_lines_that_a_disk_refuses_are_written_when_it_takes_them_again(tmp_path, capsys):
    lines = Lines(tmp_path / "late" / "metrics.jsonl")
    for step in range(3):
        lines.write({"step": step})
    (tmp_path / "late").mkdir()
    lines.again()
    lines.write({"step": 3})
    assert Follower(tmp_path / "late" / "metrics.jsonl").new() == [{"step": step, "term": 0} for step in range(4)]
    assert capsys.readouterr().err.count("cannot be written") == 1


def test_of_the_lines_that_a_disk_refuses_the_newest_are_kept_and_the_number_of_the_others_is_reported(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("recycle_pp.telemetry.events.KEPT", 10)
    lines = Lines(tmp_path / "late" / "metrics.jsonl")
    for step in range(25):
        lines.write({"step": step})
    (tmp_path / "late").mkdir()
    lines.again()
    assert Follower(tmp_path / "late" / "metrics.jsonl").new() == [{"step": step, "term": 0} for step in range(15, 25)]
    assert _reports.flush(10) and "metrics.jsonl lacks 15 lines" in capsys.readouterr().err
