"""The planner's command line: flags, the table, messages about mistakes, Ctrl-C."""

import json
import os
import pty
import shlex
import sys

import pytest
from recycle_schedules import Plan, Problem, Worker
from recycle_schedules.validate import validate

from recycle_pp import plan as command
from recycle_pp.plan import main

WORKED = ["--pipelines", "3", "--stages", "4", "--microbatches", "6"]
DEAD = [*WORKED, "--fail", "1.2"]
ROWS = ["period", "makespan", "lower bound", "against fault-free 1F1B", "bubbles", "peak micro-batches in flight"]


def saved(tmp_path, *flags: str) -> Plan:
    assert main([*flags, "--out", str(tmp_path / "plan.json")]) == 0
    found = Plan.load(tmp_path / "plan.json")
    assert validate(found) == []
    return found


def test_the_worked_example_can_be_given_by_flags(tmp_path, capsys):
    flags = shlex.split("--durations F=1,I=1,W=1,O=1 --memory 1f1b+2 --optimizer barrier --backward decoupled")
    best = saved(tmp_path, *DEAD, *flags)
    assert best.makespan == 29 + 1
    table = capsys.readouterr().out
    assert [name for name in ROWS if f"\n{name}  " in f"\n{table}"] == ROWS
    assert "30 slots (proven optimal)" in table and "+7.1% (28 slots)" in table


def test_without_flags_a_training_run_without_settings_is_planned(tmp_path, capsys):
    """docs/planner.md promises this, and `doctor` recommends the command to compile the planner."""
    best = saved(tmp_path)
    assert best.problem == saved(tmp_path, *WORKED).problem
    assert main(["--json"]) == 0
    capsys.readouterr()
    assert main(["--what-if", "--seconds", "0"]) == 0
    assert "1.2" in capsys.readouterr().out


def test_every_flag_sets_its_key(tmp_path):
    flags = shlex.split(
        "--durations F=1/1/2/1,O=3 --memory 4/3/6/none --backward mixed --optimizer staggered --reroute any --send 0.1 "
        "--send-rerouted 0.3 --allreduce 0.5 --speed 0.1=0.5 2.3=1.25 --unit ms --seconds 0"
    )
    best = saved(tmp_path, *WORKED, "--fail", "1.2,0.0", *flags)
    assert best.time_unit == "ms"
    assert best.problem == Problem(
        pipelines=3, stages=4, microbatches=6, failed=[Worker(0, 0), Worker(1, 2)],
        durations={"F": [1, 1, 2, 1], "O": 3}, memory_limit=[4, 3, 6, None], backward="mixed", optimizer="staggered",
        reroute="any", send=0.1, send_rerouted=0.3, allreduce=0.5, speed={"0,1": 0.5, "2,3": 1.25},
    )  # fmt: skip


def test_flags_override_the_keys_of_a_problem_or_plan_file(tmp_path):
    (tmp_path / "problem.json").write_text(json.dumps({"pipelines": 3, "stages": 4, "microbatches": 6, "send": 0.5}))
    best = saved(tmp_path, str(tmp_path / "problem.json"), "--stages", "2", "--memory", "3")
    assert (best.problem.stages, best.problem.send, best.problem.memory_limit) == (2, 0.5, 3)
    again = saved(tmp_path, str(tmp_path / "plan.json"), "--memory", "none")
    assert again.problem == best.problem.replace(memory_limit=None)


def test_a_file_of_settings_is_planned_like_a_command_line(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text("parallel: {pipelines: 2, stages: 3, microbatches: 5}\nmodel: {width: 16}\n")
    path = str(tmp_path / "run.yaml")
    best = saved(tmp_path, path, "parallel.microbatches=4")
    assert (best.problem.pipelines, best.problem.stages, best.problem.microbatches) == (2, 3, 4)
    assert main(["--memory", "8GB", path]) == 0
    assert "no deaths: fits" in capsys.readouterr().out


def test_the_remainder_of_a_step_has_no_period(tmp_path, capsys):
    keys = {"pipelines": 2, "stages": 2, "microbatches": 2, "failed": [[0, 1]], "done": [], "busy_until": {"1,1": 0.5}}
    (tmp_path / "left.json").write_text(json.dumps(keys))
    best = saved(tmp_path, str(tmp_path / "left.json"))
    assert best.period is None and "period" not in capsys.readouterr().out


def test_a_fault_free_plan_can_be_written_in_torchs_notation(tmp_path):
    path = tmp_path / "plan.csv"
    shape = ["--pipelines", "1", "--stages", "2", "--microbatches", "2", "--backward", "decoupled"]
    assert main([*shape, "--csv", str(path)]) == 0
    first, last = (row.split(",") for row in path.read_text().splitlines())
    assert first[:2] == ["0F0", "0F1"] and {"0I0", "0W0"} <= set(first) and last[:2] == ["1F0", "1I0"]


def test_what_if_has_a_row_for_every_worker_and_names_the_thinnest_stage(capsys):
    assert main([*DEAD, "--memory", "1f1b+2", "--what-if", "--bytes", "1GB", "--capacity", "6GB"]) == 0
    out = capsys.readouterr().out
    rows = {line.split()[0]: line for line in out.splitlines() if line[:1].isdigit()}
    assert set(rows) == {f"{d}.{s}" for d in range(3) for s in range(4)} - {"1.2"}
    assert "6 GB of 6 GB" in rows["0.0"] and rows["0.0"].rstrip().endswith("yes")
    assert "stage 2 has the least redundancy left: 2 of 3 workers alive" in out


def test_what_if_reports_a_stage_that_would_be_lost(capsys):
    assert main(["--pipelines", "1", "--stages", "2", "--microbatches", "2", "--what-if"]) == 0
    assert capsys.readouterr().out.count("no: its stage is lost") == 2


def test_what_if_reports_a_death_after_which_the_other_workers_have_no_room(tmp_path, capsys):
    stages = [{"weights": 2, "flight": 3, "boundary": 1.5}, {"weights": 1, "flight": 1}]
    shape = {"pipelines": 2, "stages": 2, "microbatches": 4}
    (tmp_path / "p.json").write_text(json.dumps(shape | {"memory": {"capacity": 14, "stages": stages}}))
    assert main([str(tmp_path / "p.json"), "--what-if", "--seconds", "0"]) == 0
    out = capsys.readouterr().out
    assert out.count("no: its peers have no room") == 2 and "its stage is lost" not in out


def problem_of_layers(path, **keys):
    """A problem file with 3 x 4 workers and 8 equal layers per stage."""
    each = [1 / 8] * 32
    shape = {"pipelines": 3, "stages": 4, "microbatches": 6, "failed": [[1, 2]]}
    path.write_text(json.dumps(shape | {"layers": {"F": each, "I": each, "W": each}} | keys))
    return str(path)


def test_the_plan_of_a_problem_with_layers_prints_its_layout(tmp_path, capsys):
    best = saved(tmp_path, problem_of_layers(tmp_path / "layers.json"))
    file = json.loads((tmp_path / "plan.json").read_text())
    assert sum(file["layout"]) == 32 and len(file["layout"]) == 4
    assert "layers" not in file["problem"] and best.value <= 21
    out = capsys.readouterr().out
    assert "against re-routed" in out and "layers by stage" in out


def test_what_if_compares_re_routing_with_moved_layers(tmp_path, capsys):
    path = problem_of_layers(tmp_path / "layers.json", failed=[])
    assert main([path, "--what-if", "--seconds", "0", "--json"]) == 0
    rows = {row["worker"]: row for row in json.loads(capsys.readouterr().out)["deaths"]}
    assert rows["1.2"]["period"] == 27 and rows["1.2"]["moved_period"] <= 21.5 and sum(rows["1.2"]["layout"]) == 32
    assert main([path, "--what-if", "--seconds", "0"]) == 0
    assert "layers moved" in capsys.readouterr().out


@pytest.mark.parametrize(("memory", "limits"), [("none", [None] * 4), ("1f1b+2", [4, 3, 4, 3])])
def test_the_json_of_what_if_has_null_for_workers_without_a_limit(memory, limits, capsys):
    flags = ["--pipelines", "2", "--stages", "2", "--microbatches", "2", "--memory", memory]
    assert main([*flags, "--what-if", "--seconds", "0", "--json"]) == 0
    assert [row["limit"] for row in json.loads(capsys.readouterr().out)["deaths"]] == limits


TRAINER = ["parallel=3x4", "model.layers=32", "emulate=sleep", "--what-if", "--json"]


def what_if(capsys, *settings):
    assert main([*TRAINER, *settings]) == 0
    return {row["worker"]: row for row in json.loads(capsys.readouterr().out)["deaths"]}


def test_what_if_shows_whether_the_trainer_would_move_layers_with_its_settings(capsys):
    moves = what_if(capsys, "schedule.rebalance=auto")["1.2"]
    assert moves["trainer_moves"] and moves["gain_seconds"] > moves["cost_seconds"] > 0
    assert moves["moved_period"] < 0.9 * moves["period"] and sum(moves["layout"]) == 32
    stays = what_if(capsys, "schedule.rebalance=auto", "schedule.outage=1")["1.2"]
    assert stays["layout"] == moves["layout"] and not stays["trainer_moves"], "the outage is too short"
    assert "trainer_moves" not in what_if(capsys)["1.2"], "schedule.rebalance=never"


def test_what_if_shows_the_decision_of_the_trainer_in_words(capsys):
    assert main([*TRAINER[:-1], "schedule.rebalance=auto"]) == 0
    out = capsys.readouterr().out
    assert "moves layers: gain" in out and "for an outage of schedule.outage=900 s" in out


MISTAKES = {
    "--fail 0.1 1.1 2.1": "failed: no live worker at stage 1",
    "--fail 7.1": "failed: worker 7.1 does not exist",
    "--fail x": "--fail: ",
    "--durations F=-1": "durations.F: -1.0 is negative",
    "--durations F=1e300": "durations: all ops and messages together could take",
    "--durations F=x": "--durations: 'F=x' is not of the form KEY=NUMBER",
    "--durations F=1/2": "durations.F: expected 4 times",
    "--durations Q=1": "durations: unknown op 'Q'",
    "--memory many": "--memory: 'many' is not none, a number",
    "--memory 0": "memory_limit: ",
    "--speed 1.2=0": "speed: ",
    "--speed 1.2": "--speed: '1.2' is not of the form KEY=NUMBER",
    "--send -1": "send: -1.0 is negative",
    "--allreduce -1": "allreduce: -1.0 is negative",
    "--microbatches 0": "--microbatches must be at least 1",
    "--stages 0": "stages: 0 is not a whole number of at least 1",
    "--seconds nan": "--seconds: nan is not a time",
    "--what-if --bytes 2e9 --capacity lots": "--capacity: 'lots' is not a size above 0, like 16GB, 512MiB or 2e9",
    "--what-if --bytes -1": "--bytes: '-1' is not a size",
    "--what-if --capacity 1e9": "--capacity requires --bytes",
    "--what-if --bytes 2e9 --capacity 1e9": "capacity: one micro-batch does not fit",
    "--out no/such/folder/plan.json": "--out: there is no folder no/such/folder",
    "--fail 1.2 --out plan.json --csv plan.csv": "--csv: only a fault-free plan has a torch CSV",
    "--speed 1.2=0.2 --reroute any --out plan.json --csv plan.csv": "fault-free",
}


@pytest.mark.parametrize(("flags", "sentence"), MISTAKES.items(), ids=MISTAKES)
def test_a_mistake_is_reported_in_one_sentence_with_exit_code_2(flags, sentence, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*WORKED, "--seconds", "0", *flags.split()]) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.count("\n") == 1 and sentence in error
    assert list(tmp_path.iterdir()) == []


FILES = {
    "{": "not JSON",
    "[]": "a plan needs the keys problem and ops",
    '{"stages": 4, "microbatches": 6}': "pipelines: missing",
    '{"pipelines": 3, "stages": 4, "microbatches": 6, "stage": 4}': "unknown problem key 'stage'",
}


@pytest.mark.parametrize(("text", "sentence"), FILES.items(), ids=FILES.values())
def test_an_invalid_file_is_reported_in_one_sentence_with_exit_code_2(text, sentence, capsys, tmp_path):
    (tmp_path / "problem.json").write_text(text)
    assert main([str(tmp_path / "problem.json")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and sentence in error


def test_a_missing_file_is_reported_in_one_sentence(capsys):
    assert main(["nowhere.json"]) == 2
    assert capsys.readouterr().err == "error: nowhere.json: No such file or directory\n"


def test_ctrl_c_before_there_is_a_plan_ends_without_a_traceback(monkeypatch, capsys):
    def interrupted(problem):
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(command, "plans", interrupted)
    assert main(DEAD) == 130
    assert capsys.readouterr().err == "\nstopped\n"


def test_ctrl_c_on_a_terminal_ends_a_long_search_with_the_best_plan_so_far(tmp_path):
    path = tmp_path / "plan.json"
    hard = ["--pipelines", "4", "--stages", "4", "--microbatches", "7", "--fail", "1.2", "--memory", "1f1b+0"]
    uneven = ["--durations", "F=1/1.3/0.9/1.1,I=0.9/1.1/0.7/1.3,W=1.2", "--seconds", "200", "--out", str(path)]
    child, terminal = pty.fork()
    if child == 0:
        os.execv(sys.executable, [sys.executable, "-m", "recycle_pp.plan", *hard, *uneven])
    shown = b""
    while b"bound" not in shown:  # the progress line of the search
        shown += os.read(terminal, 1024)
    os.write(terminal, b"\x03")
    while chunk := _read(terminal):
        shown += chunk
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(terminal)
    text = shown.decode()
    assert "of 200" in text and "stopped; this is the best plan so far" in text and "Traceback" not in text
    assert all(name in text for name in ROWS)
    assert validate(Plan.load(path)) == []


def _read(terminal: int) -> bytes:
    """Output of the terminal; b"" after its last process has ended."""
    try:
        return os.read(terminal, 1024)
    except OSError:
        return b""


LLAMA = shlex.split(
    "--model llama8b --pipelines 4 --stages 4 --microbatches 8 parallel.microbatch_size=1 numerics=bf16"
)


def test_with_a_size_as_memory_the_plan_shows_whether_each_stage_fits_with_and_without_deaths(capsys):
    assert main(["--memory", "80GB", *LLAMA]) == 0
    said = capsys.readouterr().out
    assert [name for name in ("no deaths: fits;", "one death: fits;", "two deaths: fits;") if name in said] != []
    assert said.count("optimizer state") >= 3 and said.count("recomputed") >= 12
    assert main(["--memory", "80GB", *LLAMA, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["capacity"] == 80e9 and [len(outcome["rows"]) for outcome in found["outcomes"]] == [4, 4, 4]
    assert all(row["bytes"] <= 80e9 for row in found["outcomes"][0]["rows"])


def test_a_job_that_does_not_fit_is_rejected_with_settings_that_would(capsys):
    assert main(["--memory", "30GB", *LLAMA]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --memory: a worker of stage ") and error.count("\n") == 1
    assert "and has 30 GB" in error and "it would fit with" in error


def test_a_folder_with_a_config_json_may_be_the_model(tmp_path, capsys):
    sizes = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"model_type": "llama", "vocab_size": 256}))
    assert main(["--memory", "1GB", "--model", str(tmp_path), "parallel=2x2"]) == 0
    assert "no deaths: fits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--model", "llama8b"], "--model requires --memory"),
        (["--memory", "80GB", "plan.json"], "--memory: give a model and trainer settings"),
        (["--memory", "80GB", "--model", "nobody"], "model=nobody: there is no such file"),
        (["--memory", "80GX", *WORKED], "--memory: '80GX' is not none"),
    ],
)
def test_a_mistake_about_memory_is_reported_in_one_sentence(flags, sentence, capsys):
    assert main(flags) == 2
    assert sentence in capsys.readouterr().err
