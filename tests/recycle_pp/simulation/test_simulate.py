"""The command line: flags, the table, the JSON, and the messages about mistakes."""

import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from recycle_pp.simulate import main
from recycle_pp.simulation import report
from recycle_pp.simulation.flags import job_of, parser
from recycle_pp.simulation.policies import NAMES
from recycle_pp.simulation.run import CAUSES

TRACE = Path(__file__).parents[3] / "examples" / "spot-trace-24gpu.csv"
PRICES = TRACE.with_name("prices.csv")
SMALL = f"--trace {TRACE} --pipelines 6 --stages 4 --plans 2 --microbatches 4"


def run(flags: str) -> int:
    return main(shlex.split(flags))


def test_the_json_has_every_policy_and_its_share_of_fault_free_1f1b(tmp_path, capsys):
    assert run(f"{SMALL} --json {tmp_path / 'result.json'}") == 0
    data = json.loads((tmp_path / "result.json").read_text())
    assert list(data) == ["policies"] and tuple(data["policies"]) == NAMES
    assert all(0 < policy["relative"] <= data["policies"]["bound"]["relative"] for policy in data["policies"].values())
    table = capsys.readouterr().out
    assert all(f"\n{name} " in table for name in NAMES)
    assert f"{data['policies']['oobleck']['relative']:.3f}" in table
    assert "12 recoveries of bench/recovery.py" in table, "the source of the recovery times"


def test_each_number_of_microbatches_is_a_column(capsys):
    assert run(f"{SMALL} 8 --policy torchft,bound") == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["policy", "M", "=", "4", "M", "=", "8"]
    assert [row.split()[0] for row in rows[:2]] == ["torchft", "bound"]


def test_machines_can_fail_at_random_and_in_groups(capsys):
    flags = "--mtbf 2d --repair 1h --days 3 --group 4:5d --shape 0.8 --pipelines 2 --stages 2 --microbatches 4 --seed 3"
    assert run(f"{flags} --policy rerouted,bound") == 0
    assert "4 machines for 3 d" in capsys.readouterr().out


def test_a_preset_model_on_a_gpu_can_be_simulated(capsys):
    flags = (
        "--mtbf 5d --days 1 --pipelines 2 --stages 4 --microbatches 8 --model gpt124m --gpu a100 --policy rebalanced"
    )
    assert run(flags) == 0
    out = capsys.readouterr().out
    assert "tokens/h" in out and "14 layers" in out, "including embedding and head"


@pytest.mark.parametrize(("state", "gigabytes"), [("", 0.47), ("--state 20GB", 20.0)])
def test_state_replaces_the_bytes_of_the_preset_model(state, gigabytes):
    flags = f"--mtbf 5d --pipelines 2 --stages 4 --microbatches 8 --model gpt124m --gpu a100 {state}"
    job = job_of(parser(None).parse_args(shlex.split(flags)), 8)
    assert sum(job.layer_bytes) / 4 / 1e9 == pytest.approx(gigabytes, rel=0.05)


def test_durations_can_come_from_a_measured_run(tmp_path, capsys):
    measured = {kind: [0.02, 0.04] for kind in "FIW"} | {"O": [0.0, 0.0]}
    (tmp_path / "profile.json").write_text(json.dumps({"durations_seconds": measured}))
    flags = f"--mtbf 5d --days 1 --profile {tmp_path / 'profile.json'} --pipelines 2 --microbatches 4 --policy bound"
    assert run(flags) == 0
    assert "profile.json" in capsys.readouterr().out


@pytest.mark.parametrize("flags", ["", "--best --capacity 60GB"])
def test_a_profile_with_the_time_of_each_stages_sum_can_be_simulated_with_other_numbers_of_stages(
    flags, tmp_path, capsys
):
    measured = {kind: [0.02, 0.04] for kind in "FIWO"}
    profile = {"durations_seconds": measured, "message_seconds": 0.001, "sum_seconds": [0.01, 0.03]}
    (tmp_path / "profile.json").write_text(json.dumps(profile))
    assert run(f"--mtbf 1d --days 1 --profile {tmp_path} --pipelines 2 --microbatches 4 --plans 2 {flags}") == 0
    assert "oobleck" in capsys.readouterr().out or flags


@pytest.mark.parametrize("damage", [b"", b"\xff\x00", b"parallel: [2", b"- 1", b"parallel: {pipelines: many}"])
def test_a_damaged_configuration_beside_the_profile_is_reported_in_one_sentence_with_exit_code_2(
    damage, tmp_path, capsys
):
    measured = {kind: [0.02, 0.04] for kind in "FIWO"}
    (tmp_path / "profile.json").write_text(json.dumps({"durations_seconds": measured}))
    (tmp_path / "config.yaml").write_bytes(damage)
    assert run(f"--mtbf 5d --days 1 --profile {tmp_path} --policy bound") == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {tmp_path / 'config.yaml'}") and len(said.splitlines()) == 1


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--pipelines 2 --stages 2 --microbatches 4", "--trace FILE or --mtbf TIME must describe the machines"),
        ("--mtbf 2h --stages 2 --microbatches 4", "--pipelines is needed"),
        ("--mtbf never --pipelines 2 --stages 2 --microbatches 4", "--mtbf must be a time above 0"),
        ("--trace nowhere.csv --pipelines 2 --stages 2 --microbatches 4", "nowhere.csv: No such file"),
        (f"{SMALL} --policy fast", "--policy: 'fast' is not one of"),
        (f"{SMALL} --machines 20", "--machines 20: the trace has between 15 and 24 machines"),
        (f"{SMALL} --stages 0", "--stages must be at least 1"),
        (f"{SMALL} --layers 3", "--layers 3: each of the 4 stages needs at least one"),
        (f"{SMALL} --state huge", "--state: 'huge' is not a size"),
        (f"{SMALL} --model gpt124m", "--model and --gpu must be given together"),
        (f"{SMALL} --model gpt124m --gpu a100 --layers 30", "--layers is not allowed here, because --model and --gpu"),
        (f"{SMALL} --model gpt124m --gpu a100 --durations F=9", "--durations is not allowed here, because --model and"),
        (f"{SMALL} --profile nowhere --durations F=9", "--durations is not allowed here, because --profile has"),
        (f"{SMALL} --profile nowhere", "--profile nowhere: no profile.json"),
        (f"{SMALL} --recovery {TRACE}", "must be an output file of bench/recovery.py"),
        (f"{SMALL} --moves {TRACE}", "must be a run folder or an output file of bench/moves.py"),
        (f"{SMALL} --durations F=0,I=0,W=0", "--durations: at least one of F, I and W must be above 0"),
        ("--mtbf 2h --days nan --pipelines 2 --stages 2 --microbatches 4", "--days must be a number above 0, not nan"),
        (f"{SMALL} --days -1", "--days must be a number above 0, not -1"),
        (f"--prices {PRICES} --days inf --pipelines 2 --stages 2 --microbatches 4", "--days and --shape must be"),
        ("--mtbf 2h --shape 0.005 --pipelines 2 --stages 2 --microbatches 4", "and --shape at least 0.01"),
        (f"{SMALL} --group 8", "--group: '8' is not of the form SIZE:MTBF"),
        (f"{SMALL} 8 --json x.json", "--json allows a single value of --microbatches"),
    ],
)
def test_a_mistake_is_reported_in_one_sentence_with_exit_code_2(flags, words, capsys):
    if "--group" in flags:
        flags = flags.replace(f"--trace {TRACE}", "--mtbf 1d")
    assert run(flags) == 2
    said = capsys.readouterr().err
    assert words in said and len(said.splitlines()) == 1


def test_the_page_distinguishes_the_trainers_default_from_schedule_rebalance_auto(tmp_path, capsys):
    assert run(f"{SMALL} --policy rerouted,rebalanced,torchft --out {tmp_path / 'a.html'}") == 0
    page = (tmp_path / "a.html").read_text()
    for text in (page, capsys.readouterr().out):
        assert re.search(r"recycle_pp re-routes \(rerouted\): [01]\.\d\d\d of", text)
        assert re.search(r"with schedule.rebalance=auto it also moves layers \(rebalanced\): [01]\.\d\d\d", text)
        assert "best of the other policies: torchft, " in text


def test_no_share_is_printed_as_minus_zero(monkeypatch):
    shares = dict.fromkeys(("work", *CAUSES), -1e-9)
    outcome = SimpleNamespace(shares=shares, relative=0.0, redone=0.0, steps=0.0, seconds=1.0)
    job = SimpleNamespace(tokens=1, total=1)
    table = report.table([SimpleNamespace(job=job, outcomes={"rerouted": outcome})])
    cells = [cell for column in table.columns for cell in column.cells]
    assert "0.0 %" in cells and "-0.0 %" not in cells


def test_the_file_of_every_out_flag_is_written(tmp_path, capsys):
    assert run(f"{SMALL} --policy rerouted --out {tmp_path / 'a.html'} --out {tmp_path / 'b.svg'}") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "b.svg"]
