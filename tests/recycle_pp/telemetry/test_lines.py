"""Lines of .jsonl files, on disks that work and on disks that fail."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recycle_pp.telemetry import unwritten, warn
from recycle_pp.telemetry.follower import Follower
from recycle_pp.telemetry.lines import Lines


@given(value=st.floats())
def test_lines_are_json_for_every_number(value, tmp_path_factory):
    path = tmp_path_factory.mktemp("lines") / "metrics.jsonl"
    written = Lines(path)
    written.write({"step": 0, "loss": value, "list": [value, {"deep": value}]})
    written.close()
    record = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    expected = value if math.isfinite(value) else None
    assert record == {"step": 0, "loss": expected, "list": [expected, {"deep": expected}], "term": 0}


def test_lines_that_a_disk_rejected_are_written_when_it_accepts_them(tmp_path, capsys):
    written = Lines(tmp_path / "late" / "metrics.jsonl")
    for step in range(3):
        written.write({"step": step})
    (tmp_path / "late").mkdir()
    written.retry()
    written.write({"step": 3})
    assert Follower(tmp_path / "late" / "metrics.jsonl").new() == [{"step": step, "term": 0} for step in range(4)]
    assert capsys.readouterr().err.count("cannot be written") == 1


def test_an_incomplete_line_of_an_earlier_coordinator_does_not_damage_the_next_line(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"event":"started","step":0,"term":0}\n{"event":"star')
    written = Lines(path)
    written.write({"event": "left", "step": 1})
    written.close()
    follower = Follower(path, 0, lambda line: (json.loads(line)["event"], 0))
    assert follower.new() == ["started", "left"] and follower.damage is None


def test_the_newest_rejected_lines_are_kept_and_the_number_of_lost_ones_is_reported(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(unwritten, "MOST_BYTES", 10 * len('{"step":10}'))
    written = Lines(tmp_path / "late" / "metrics.jsonl")
    for step in range(25):
        written.write({"step": step})
    (tmp_path / "late").mkdir()
    written.retry()
    assert Follower(tmp_path / "late" / "metrics.jsonl").new() == [{"step": step, "term": 0} for step in range(15, 25)]
    assert warn.flush(10) and "metrics.jsonl lacks 15 lines" in capsys.readouterr().err
