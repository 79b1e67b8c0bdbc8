"""Events: their lines, their sentences and their rows in docs/run-folder.md."""

import inspect
import json
import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from recycle_pp.telemetry.events.catalog import EVENTS, parse
from recycle_pp.telemetry.events.checkpoints import CheckpointSaved
from recycle_pp.telemetry.events.deaths import DeathDetected, DeathExplained, explained
from recycle_pp.telemetry.events.event import Event
from recycle_pp.telemetry.events.job import Started
from recycle_pp.telemetry.events.recovery import Resumed
from recycle_pp.telemetry.events.workers import GivenUp

DOCUMENT = Path(__file__).parents[3] / "docs" / "run-folder.md"
VALUES = {int: 1, float: 0.5, str: "x", bool: True, list[int]: [1, 2], list[str]: ["0.1"], dict[str, float]: {"a": 0.5}}
EACH = pytest.mark.parametrize("cls", EVENTS.values(), ids=list(EVENTS))


def example(cls):
    """An event of this class with a value in every field."""

    def value(of):
        kinds = [kind for kind in (of, *get_args(of)) if kind in VALUES]
        return VALUES[kinds[0]] if kinds else value(get_args(of)[0])

    fields = msgspec.structs.fields(cls)
    return cls(**{field.name: value(field.type) for field in fields} | {"step": 3, "worker": "1.2"})


@EACH
def test_a_reader_gets_the_event_that_was_written(cls):
    event = example(cls)
    line = json.loads(json.dumps(event.line()))
    assert list(line)[:5] == ["time", "event", "step", "generation", "worker"] and line["event"] == cls.name()
    assert type(parse(line)) is cls and parse(line) == event


@EACH
def test_every_event_has_a_sentence_that_begins_with_its_step(cls):
    sentence = example(cls).sentence(60)
    assert re.match(r"step 3: \S", sentence) and "UNSET" not in sentence and "None" not in sentence


@EACH
def test_the_document_has_the_docstring_of_every_event_as_its_row(cls):
    row = f"| `{cls.name()}` | {' '.join(inspect.getdoc(cls).split())} |"
    assert row in DOCUMENT.read_text().splitlines(), f"add to docs/run-folder.md:\n{row}"


@EACH
def test_the_docstring_of_every_event_explains_its_fields_and_no_others(cls):
    explained = set(re.findall(r"`(\w+)`", re.sub(r"\(.*?\)", "", inspect.getdoc(cls), flags=re.DOTALL)))
    assert explained - EVENTS.keys() == set(cls.__struct_fields__) - set(Event.__struct_fields__)


def test_the_document_names_no_other_event():
    section = DOCUMENT.read_text().split("\n## events.jsonl\n")[1].split("\n## ")[0]
    assert re.findall(r"^\| `(\w+)`", section, re.MULTILINE) == list(EVENTS)


def test_these_events_are_shown_by_exporters():
    assert {name for name, cls in EVENTS.items() if cls.exported} == {
        "death_detected", "resumed", "rejoined", "left", "slow", "slow_no_more", "plan_adopted", "stage_lost",
        "restored", "rebalanced", "coordinator_elected", "node_joined", "checkpoint_saved", "checkpoint_stored",
        "stopped", "finished", "health_found", "health_over",
        "took_over", "understudy_in_step", "round_applied", "island_joined", "island_left", "island_late",
    }  # fmt: skip


@pytest.mark.parametrize(
    "record",
    [
        {"event": "a_new_one", "step": 3, "worker": "1.2", "more": 1},
        {"event": "respawned", "step": 3, "worker": "1.2"},  # without its `respawns`
    ],
)
def test_the_event_of_another_version_is_a_plain_event(record):
    event = parse(record)
    assert type(event) is Event and (event.step, event.worker) == (3, "1.2")


def test_an_unknown_field_of_an_event_is_ignored():
    assert parse({"event": "finished", "step": 3, "mood": "good"}).name() == "finished"


@pytest.mark.parametrize(
    "record", [7, {}, {"event": 7, "step": 3}, {"event": "left"}, {"event": "started", "step": 3, "workers": -1}]
)
def test_a_damaged_line_is_rejected(record):
    with pytest.raises(msgspec.ValidationError):
        parse(record)


def test_a_cause_that_becomes_known_later_replaces_the_assumed_one():
    death = DeathDetected(step=3, worker="1.1", cause="unknown", detail="?", time=1.0)
    other = DeathDetected(step=3, worker="0.1", cause="unknown", detail="?", time=1.0)
    late = DeathExplained(worker="1.1", cause="signal", detail="SIGKILL", injected=True)
    first, second, resumed = explained([death, other, Resumed(), late])
    assert first == DeathDetected(step=3, worker="1.1", cause="signal", detail="SIGKILL", injected=True, time=1.0)
    assert second == other and isinstance(resumed, Resumed)


@pytest.mark.parametrize(
    ("details", "sentence"),
    [
        ({"cause": "signal", "detail": "SIGKILL", "injected": True}, "killed by SIGKILL, an injected failure"),
        ({"cause": "exception", "detail": "Traceback ...\nValueError: no such token\n"}, "ValueError: no such token"),
        ({"cause": "out_of_memory", "detail": "SIGKILL by the kernel"}, "out of memory"),
        ({"cause": "hang", "detail": "F of micro-batch 1.3 in step 20, for 10.2 s"}, "stuck in F of micro-batch 1.3"),
        ({"cause": "node_loss", "detail": "its supervisor disconnected"}, "its node is lost"),
        ({"cause": "exit", "detail": "exit code 7"}, "died (exit code 7)"),
        ({"cause": "something new", "detail": "x"}, "something new x"),
        ({}, "died"),
    ],
)
def test_causes_are_described_in_words(details, sentence):
    event = parse({"event": "death_detected", "step": 20, "worker": "1.2", **details})
    assert sentence in event.sentence(60)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_plurals_are_right_and_the_first_step_is_step_0(count):
    counted = Started(workers=count), Resumed(lost_ops=count), GivenUp(worker="0.1", respawns=count)
    for sentence in (event.sentence(60) for event in counted):
        assert not re.search(r"\b1 (ops|restarts|steps|workers)\b|\b[02] (op|restart|step|worker)\b", sentence)
        assert sentence.startswith("step 0: ")


def test_a_worker_that_may_not_restart_is_not_reported_as_dead_again():
    never, once = (GivenUp(step=3, worker="1.1", respawns=respawns) for respawns in (0, 1))
    assert never.sentence(60) == "step 3: worker 1.1 is not restarted: run.respawns allows no restart"
    assert "died again after 1 restart and is" in once.sentence(60)


def test_no_sentence_names_a_step_beyond_the_end_of_the_run():
    within, after = (CheckpointSaved(step=step, checkpoint=step) for step in (59, 60))
    assert within.sentence(60) == "step 59: checkpoint step-000059 saved"
    assert after.sentence(60) == "after step 59: checkpoint step-000060 saved"
