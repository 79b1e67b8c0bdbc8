"""`plan` and `visualize` read the same command lines and print the same figures."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml
from recycle_schedules import Problem, Worker, plan

from recycle_pp import plan as plan_command
from recycle_pp import visualize
from recycle_pp.config.settings import Settings
from recycle_pp.fitting.problem import initial_problem
from recycle_pp.fitting.problem_source import read_file

from ..drawing.examples import DEAD, recovered, run_folder, shape

SOURCES = [
    "--pipelines 3 --stages 4 --microbatches 6 --fail 1.2",
    "parallel=2x4 emulate=sleep +fail_at=20:0.1",
    "--fail 1.2 --memory none --optimizer staggered --durations F=1,I=1,W=1,O=0",
    "{folder}/problem.json",
    "{folder}/problem.json --fail 0.0",
    "{folder}/plan.json",
    "{folder}/trace.json",
    "{folder}/run",
    "{folder}/run --step 19",
    "{folder}/untraced",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    (folder / "problem.json").write_text(json.dumps(shape((DEAD,)).to_json()))
    plan(shape((DEAD,))).save(folder / "plan.json")
    recovered().save(folder / "trace.json")
    run_folder(folder / "run")
    (folder / "untraced").mkdir()
    (folder / "untraced" / "config.yaml").write_text(yaml.safe_dump(asdict(Settings())))
    return folder


@pytest.mark.parametrize("source", SOURCES)
def test_plan_and_visualize_print_the_same_figures(
    source: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = shlex.split(source.format(folder=folder))
    assert plan_command.main(arguments) == 0
    planned = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert visualize.main([*arguments, "--width", "160"]) == 0
    drawn = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert len(planned) >= 5 and drawn[-len(planned) :] == planned
    assert any(line[0] in ("period", "makespan") for line in planned)
    assert any(line[0] == "bubbles" and line[1].endswith("%") for line in planned)


def test_flags_have_the_defaults_of_a_training_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_command.main(["--stages", "4", "--json", "--seconds", "0"]) == 0
    problem = Problem.from_json(json.loads(capsys.readouterr().out)["problem"])
    assert problem == initial_problem(Settings().with_values({"schedule.profile_steps": 0}))


def test_settings_of_the_trainer_are_flags_and_workers_to_be_killed_are_dead(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = "parallel=2x2 schedule.memory_extra=0 optimizer.stagger=true +fail_at=[3:0.1,4:1.0] --send 0.5"
    assert plan_command.main([*flags.split(), "--json"]) == 0
    found = Problem.from_json(json.loads(capsys.readouterr().out)["problem"])
    assert (found.pipelines, found.stages, found.send, found.optimizer) == (2, 2, 0.5, "staggered")
    assert found.dead == {Worker(0, 1), Worker(1, 0)} and found.memory_limit == {"base": "1f1b", "extra": 0}


def test_defaults_of_a_problem_file_are_as_documented(folder: Path) -> None:
    (folder / "bare.json").write_text('{"pipelines": 1, "stages": 2, "microbatches": 4}')
    assert read_file(folder / "bare.json").problem == Problem(1, 2, 4)


def test_figures_are_available_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_command.main([str(folder / "trace.json"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["lost_ops"] == found["redone_ops"] == 6 and found["period"] is None
    assert plan_command.main(["--fail", "1.2", "--what-if", "--json", "--bytes", "2GB", "--capacity", "16GB"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["deaths"]) == 11 and all(row["bytes"] <= 16e9 for row in found["deaths"])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("{folder}/plan.json parallel=2x2", "either {folder}/plan.json or settings of the trainer (parallel=2x2)"),
        ("{folder}/plan.json {folder}/trace.json", "one source at a time"),
        ("parallel=9x", "parallel=9x: there is no such file"),
        ("--fail 1.2 --step 3", "--step needs a run folder"),
    ],
)
def test_plan_and_visualize_refuse_with_the_same_sentence(
    words: str, sentence: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = words.format(folder=folder).split()
    assert plan_command.main(arguments) == 2 and visualize.main(arguments) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert sentence.format(folder=folder) in first and first.partition(": ")[2] == second.partition(": ")[2]


def test_a_plan_with_links_is_compared_with_a_plan_that_ignores_them(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {"pipelines": 2, "stages": 2, "microbatches": 4, "failed": [[1, 0]]}
    links = {"hosts": [["a", "b"], ["b", "a"]], "between_hosts": {"latency": 0.5, "bandwidth": 4.0}, "bytes": 2.0}
    (folder / "links.json").write_text(json.dumps(keys | {"links": links}))
    printed = []
    for unit in ("slots", "s"):  # seconds are drawn as milliseconds, including those of links
        assert plan_command.main([str(folder / "links.json"), "--unit", unit, "--seconds", "0"]) == 0
        rows = [line.split() for line in capsys.readouterr().out.splitlines()]
        printed.append({" ".join(row[:-2]): row[-2] for row in rows if row[:2] == ["against", "ignoring"]})
    assert len(printed[0]) == 1 and printed[0].keys() == printed[1].keys()


@pytest.mark.parametrize(("more", "layers"), [("", [3, 4, 4, 1]), ("model.split=null", None)])
def test_a_plan_uses_the_layout_at_the_start_of_a_job_and_durations_in_proportion_to_weights(
    more: str, layers: list[int] | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """gpt124m: the head weighs as much as five layers."""
    assert plan_command.main(f"model=gpt124m parallel=2x4 --json --seconds 0 {more}".split()) == 0
    found = json.loads(capsys.readouterr().out)
    forward = found["problem"]["durations"]["F"]
    assert found["layout"] == layers
    assert sum(forward) == pytest.approx(4) and forward[3] > max(forward[:3])
    assert forward[3] == pytest.approx((45.7 if layers else 59.9) / 30.9, rel=0.01)


def test_a_memory_table_uses_the_layout_at_the_start_of_a_job(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_command.main(["--memory", "16GB", "--model", "gpt124m", "parallel=2x4", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["outcomes"][0]["rows"]
    assert [row["layers"] for row in rows] == [3, 4, 4, 1]
