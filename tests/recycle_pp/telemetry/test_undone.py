"""Lines of rolled-back steps are cut from files with one line per step, even while a reader follows the files."""

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recycle_pp.telemetry.background import Background
from recycle_pp.telemetry.follower import Follower
from recycle_pp.telemetry.lines import Lines
from recycle_pp.telemetry.undone import cut


def write(path, steps, **more):
    lines = Lines(path)
    for step in steps:
        lines.write({"step": step, **more})
    lines.close()


def steps_in(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_cut_does_not_change_the_kept_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, range(30))
    before = path.read_bytes()
    cut(path, 20)
    assert steps_in(path) == [*range(20)] and before.startswith(path.read_bytes())
    cut(path, 20)
    cut(tmp_path / "missing", 20)
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_cut_removes_an_incomplete_last_line_and_keeps_damaged_ones(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n\xff\xfe{\n{"step": 1}\n{"st')
    cut(path, 9)
    assert path.read_bytes() == b'{"step": 0}\n\xff\xfe{\n{"step": 1}\n'


def test_a_cut_removes_lines_queued_before_it_and_keeps_later_ones(tmp_path):
    path, later = tmp_path / "metrics.jsonl", Background("test")
    lines = Lines(path, later)
    for step in range(1000):
        lines.write({"step": step, "again": False})
    lines.cut(990)
    for step in range(990, 1010):
        lines.write({"step": step, "again": True})
    lines.close()
    assert later.flush(10.0)
    assert steps_in(path) == [*range(1010)]
    assert [json.loads(line)["again"] for line in path.read_text().splitlines()] == [False] * 990 + [True] * 20


def test_rolled_back_lines_that_the_disk_rejected_are_never_written(tmp_path):
    folder = tmp_path / "run"
    lines = Lines(folder / "metrics.jsonl")  # the folder does not exist
    for step in range(5):
        lines.write({"step": step})
    lines.cut(3)
    folder.mkdir()
    lines.write({"step": 3, "again": True})
    lines.close()
    assert steps_in(folder / "metrics.jsonl") == [0, 1, 2, 3]


@pytest.mark.parametrize("look_between", [False, True])
def test_a_reader_gets_the_lines_after_a_cut_and_no_kept_line_twice(tmp_path, look_between):
    path = tmp_path / "metrics.jsonl"
    write(path, range(30), attempt=0)
    follower = Follower(path)
    assert [line["step"] for line in follower.new()] == [*range(30)]
    cut(path, 20)
    if look_between:
        assert follower.new() == []
    write(path, range(20, 60), attempt=1)  # longer than before
    assert [(line["step"], line["attempt"]) for line in follower.new()] == [(step, 1) for step in range(20, 60)]


def test_a_reader_that_skips_known_bytes_gets_the_lines_of_repeated_steps(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, range(30), attempt=0)
    follower = Follower(path, skip=path.stat().st_size)
    write(path, [30], attempt=0)
    assert [line["step"] for line in follower.new()] == [30]
    cut(path, 20)
    write(path, range(20, 25), attempt=1)
    assert [line["step"] for line in follower.new()] == [*range(20, 25)]


@given(st.lists(st.tuples(st.sampled_from(["write", "cut", "look"]), st.integers(0, 6)), max_size=40))
def test_a_reader_has_the_lines_of_the_file_after_any_order_of_writes_cuts_and_reads(actions):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        lines, follower, held, steps = Lines(path), Follower(path), {}, 0
        for number, (action, count) in enumerate([*actions, ("look", 0)]):
            if action == "write":
                for _ in range(count):
                    lines.write({"step": steps, "number": number})
                    steps += 1
            elif action == "cut":
                steps = max(0, steps - count)
                lines.cut(steps)
            else:
                new = [(line["step"], line["number"]) for line in follower.new()]
                assert not set(new) & held.items(), "a line came twice"
                held = {step: of for step, of in held.items() if step < min([steps, *(s for s, _ in new)])} | dict(new)
        lines.close()
        assert held == {line["step"]: line["number"] for line in Follower(path).new()}
