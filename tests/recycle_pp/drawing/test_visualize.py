"""The command line: sources, files, messages."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from recycle_schedules import plan

from recycle_pp.telemetry.heartbeat import Heartbeat
from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.visualize import main

from .examples import DEAD, recovered, run_folder, shape

FLAGS = ["--pipelines", "3", "--stages", "4", "--microbatches", "6", "--fail", "1.2"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return run_folder(tmp_path / "demo")


def test_a_problem_by_flags_is_planned_and_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FLAGS, "--width", "120"]) == 0
    out = capsys.readouterr().out
    assert " dead ╱" in out and "against fault-free 1F1B" in out and "peak micro-batches in flight" in out


def test_a_problem_with_layers_is_drawn_re_routed_and_with_moved_layers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    each = [0.25] * 8
    keys = {"pipelines": 2, "stages": 2, "microbatches": 4, "failed": [[1, 1]]}
    (tmp_path / "x.json").write_text(json.dumps(keys | {"layers": {"F": each, "I": each, "W": each}}))
    assert main([str(tmp_path / "x.json"), "--width", "120"]) == 0
    out = capsys.readouterr().out
    assert "re-routed" in out and "boundaries moved" in out and out.count(" dead ╱") == 2
    assert "against re-routed" in out and "4 4" in out


@pytest.mark.parametrize("what", ["plan", "trace", "problem"])
def test_a_file_may_be_a_plan_a_trace_or_a_problem(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.json"
    if what == "problem":
        path.write_text(json.dumps(shape((DEAD,)).to_json()))
    else:
        (plan(shape((DEAD,))) if what == "plan" else recovered()).save(path)
    assert main([str(path), "--width", "140"]) == 0
    assert ("died at 213 ms" in capsys.readouterr().out) == (what == "trace")


def test_a_run_folder_shows_the_step_with_a_death(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run), "--width", "140"]) == 0
    out = capsys.readouterr().out
    assert "step 20, as measured" in out and "W(1,2) died" in out and "against step 19" in out
    assert main([str(run), "--step", "19", "--width", "140"]) == 0
    assert "died" not in capsys.readouterr().out


def test_a_step_of_a_run_shows_the_layers_of_each_stage(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = run / "traces" / "step-000019.json"
    trace.write_text(json.dumps(json.loads(trace.read_text()) | {"layout": [9, 9, 5, 9]}))
    assert main([str(run), "--step", "19", "--with-plan", "--width", "140"]) == 0
    [row] = [line for line in capsys.readouterr().out.splitlines() if "layers by stage" in line]
    assert row.count("9 9 5 9") == 2, "once for the step and once for its plan"


def test_the_step_before_a_move_of_layers_is_drawn_above_the_first_step_after_it(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step, layout in ((19, [8, 8, 8, 8]), (20, [9, 9, 5, 9])):
        trace = run / "traces" / f"step-{step:06}.json"
        trace.write_text(json.dumps(json.loads(trace.read_text()) | {"layout": layout}))
    assert main([str(run), "--step", "20", "--width", "140"]) == 0
    out = capsys.readouterr().out
    [row] = [line for line in out.splitlines() if "layers by stage" in line]
    assert "8 8 8 8" in row and "9 9 5 9" in row
    assert out.count("against step 19") == 1


def test_every_format_can_be_written(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [str(tmp_path / f"x.{ending}") for ending in ("svg", "png", "pdf", "html", "json", "csv")]
    assert main([str(run), *(word for name in names for word in ("--out", name))]) == 0
    assert all(Path(name).stat().st_size > 500 for name in names)
    assert sorted(capsys.readouterr().out.split()) == sorted([*["wrote"] * 6, *names])


def test_two_sources_are_compared(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recovered().save(tmp_path / "b.json")
    assert main(["--compare", str(run), str(tmp_path / "b.json"), "--step", "19", "--width", "140"]) == 0
    out = capsys.readouterr().out
    assert "against demo, step 19" in " ".join(out.split()) and "b.json" in out


@pytest.mark.parametrize("name", ["1f1b", "fault-free"])
def test_a_plan_is_drawn_below_its_fault_free_counterpart(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FLAGS, "--against", name, "--width", "120"]) == 0
    out = capsys.readouterr().out
    assert out.index("fault-free") < out.index("W(1,2) dead") and out.count("1.2   ") == 2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "a source is needed: a file with a problem, a plan or a trace, a run folder, or flags for a problem"),
        (["missing.json"], "missing.json: No such file or directory"),
        (["{run}", "--step", "7"], "{run} has no trace of step 7; there are 19, 20, 21"),
        (["{run}", "--out", "x.gif"], "--out x.gif: the ending must be one of .svg, .png, .pdf, .html, .json, .csv"),
        (["{run}", "--out", "{run}/no/such/x.png"], "{run}/no/such/x.png: No such file or directory"),
        (["{run}", "--out", "{run}/no/such/x.html"], "{run}/no/such/x.html: No such file or directory"),
        (
            [*FLAGS, "--step", "3", "{run}/metrics.jsonl"],
            "--step needs a run folder, but {run}/metrics.jsonl is a file",
        ),
        (["{run}/metrics.jsonl"], "{run}/metrics.jsonl: a plan needs the keys problem and ops"),
        ([*FLAGS, "--fail", "9.9"], "failed: "),
        ([*FLAGS, "--fail", "x"], "--fail: a worker is written PIPELINE.STAGE, like 1.2, not 'x'"),
        ([*FLAGS, "--memory", "lots"], "--memory: 'lots' is not none, a number, one per stage (4/3/6/1), or 1f1b+k"),
        ([*FLAGS, "--durations", "F1"], "--durations: 'F1' is not of the form KEY=NUMBER"),
        ([*FLAGS, "--from", "5", "--to", "5"], "--to (5) must be later than --from (5)"),
        ([*FLAGS, "--width", "0"], "--width must be above 0, not 0"),
        ([*FLAGS, "--width", "-5"], "--width must be above 0, not -5"),
        ([*FLAGS, "--inches", "nan"], "--inches must be above 0, not nan"),
        ([*FLAGS, "--from", "nan"], "--from must be a time, not nan"),
        ([*FLAGS, "--to", "inf"], "--to must be a time, not inf"),
        (["--follow"], "--follow needs a run folder"),
        (["--stages", "four"], "argument --stages: invalid int value: 'four'"),
    ],
)
def test_a_mistake_is_reported_in_one_sentence(
    arguments: list[str], sentence: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([a.format(run=run) for a in arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("visualize: " + sentence.format(run=run)) and said.count("\n") == 1


PROBLEM = '"problem": {"pipelines": 1, "stages": 1, "microbatches": 1}'


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", "3", "null", "{", "\x00\xff", "[" * 100000),
        '{"problem": 1, "ops": []}',
        f'{{{PROBLEM}, "ops": 5}}',
        f'{{{PROBLEM}, "ops": [5]}}',
        f'{{{PROBLEM}, "ops": [], "generation": "x"}}',
        '{"pipelines": "x", "stages": 2, "microbatches": 1}',
    ],
)
def test_a_broken_file_is_named_in_one_sentence(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content.encode("latin-1"))
    assert main([str(path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"visualize: {path}: ") and said.count("\n") == 1


def test_a_plan_without_ops_can_be_drawn(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"problem": {"pipelines": 2, "stages": 2, "microbatches": 0}, "ops": []}))
    assert (
        main([str(path), *(w for e in ("svg", "html", "json", "csv") for w in ("--out", str(tmp_path / f"y.{e}")))])
        == 0
    )
    assert main([str(path)]) == 0


def test_a_plan_whose_ops_take_no_time_can_be_drawn(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan(shape(scale=0)).save(path)
    for ending in ("svg", "html", "json"):
        assert main([str(path), "--out", str(tmp_path / f"x.{ending}")]) == 0
    assert main([str(path)]) == 0


def test_following_draws_each_new_step_until_the_run_ends(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    later = run / "traces" / "step-000021.json"
    shutil.move(later, run / "kept")

    def go_on() -> None:
        time.sleep(0.7)
        shutil.move(run / "kept", later)
        time.sleep(0.7)
        (run / "summary.json").write_text("{}")

    thread = threading.Thread(target=go_on)
    thread.start()
    assert main([str(run), "--follow", "--width", "140"]) == 0
    thread.join()
    out = capsys.readouterr().out
    assert out.index("step 20, as measured") < out.index("step 21, as measured") < out.index("the run has ended")
    assert "step 21, loss 2.5000, 1,000 tokens/s, 11 live workers" in out


def test_following_a_run_that_was_stopped_ends(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Heartbeat(RunFolder(run), lambda: 0, "127.0.0.1:1").end([], code=130)
    assert main([str(run), "--follow", "--width", "140"]) == 0
    assert "the run has ended" in capsys.readouterr().out


def test_a_closed_pipe_is_not_an_error() -> None:
    command = [sys.executable, "-m", "recycle_pp.visualize", *FLAGS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout and process.stderr
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait(30) == 0
