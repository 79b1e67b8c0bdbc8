"""The command `recycle`, run as a module, because an older installation may not have the command."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import psutil
import pytest

from recycle_pp.cli import COMMANDS
from recycle_pp.telemetry.run_folder import RunFolder

ROOT = Path(__file__).parents[2]
RECYCLE = [sys.executable, "-m", "recycle_pp.cli"]
TINY = ["parallel=2x1", "model=tiny", "run.validate_every=0", "run.dir=run"]
ENVIRONMENT = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
NO_TORCH = "import sys; sys.modules['torch'] = None; from recycle_pp.cli import main; sys.exit(main(sys.argv[1:]))"

pytestmark = pytest.mark.timeout(180)


def run(*arguments, cwd, program=RECYCLE, **environment):
    return subprocess.run(
        [*program, *arguments],
        env=ENVIRONMENT | environment, cwd=cwd, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_the_package_installs_the_command():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"recycle": "recycle_pp.cli:main"}


@pytest.mark.parametrize("arguments", [[], ["--help"]], ids=["nothing", "--help"])
def test_without_arguments_recycle_lists_the_commands_and_imports_no_torch(arguments, tmp_path):
    done = run(*arguments, cwd=tmp_path, program=[sys.executable, "-c", NO_TORCH])
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert {line.split()[0] for line in lines[lines.index("commands:") + 1 : -2]} == set(COMMANDS)


def test_every_module_with_a_command_line_is_listed():
    """Except machine_checks, which `doctor` runs."""
    package = ROOT / "recycle_pp"
    modules = {path.stem for path in package.glob("*.py") if "__main__" in path.read_text()}
    modules |= {path.parent.name for path in package.glob("*/__main__.py")}
    assert set(COMMANDS) == modules - {"cli", "machine_checks"}


def test_the_error_about_an_unknown_command_names_the_closest_one(tmp_path):
    done = run("statsu", "runs/mine", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "recycle: statsu is not a command; did you mean status?\n"
    assert run("nosuch", cwd=tmp_path).stderr.startswith(
        "recycle: nosuch is not a command; the commands are: init, train, "
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_runs_the_module_with_its_name(name, tmp_path):
    (tmp_path / "recycle_pp").mkdir()  # shadows the real package
    (tmp_path / "recycle_pp" / "__init__.py").touch()
    for file in ("cli.py", "command.py"):
        (tmp_path / "recycle_pp" / file).write_text((ROOT / "recycle_pp" / file).read_text())
    module = "import os, sys\nprint(__name__, os.getpid(), sys.argv[1:])\nsys.exit(7)\n"
    (tmp_path / "recycle_pp" / f"{name}.py").write_text(module)
    process = subprocess.Popen(
        [*RECYCLE, name, "a b", "--c"],
        cwd=tmp_path, env=ENVIRONMENT | {"RANK": "0", "PYTHONPATH": str(tmp_path)}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (7, f"__main__ {process.pid} ['a b', '--c']\n")


@pytest.mark.parametrize("arguments", [["--clear", "GPU-1", "none"], ["--active", "--seconds", "x"]])
def test_a_mistake_in_health_is_refused_without_torch(arguments, tmp_path):
    done = run("health", *arguments, cwd=tmp_path, program=[sys.executable, "-c", NO_TORCH])
    assert (done.returncode, done.stdout, "Traceback" in done.stderr) == (2, "", False)


def test_train_prints_the_help_of_the_trainer(tmp_path):
    done = run("train", "--help", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "recycle train [FILE.yaml] [GROUP=NAME" in done.stdout


MISTAKES = [
    (["run.stepz=3"], "run.stepz is not a configuration key; did you mean run.steps?"),
    (["run.yaml"], "run.yaml: there is no such file; recycle init run.yaml writes one"),
    (["parallel=2x3", "model.layers=2"], "model.layers must be at least parallel.stages = 3"),
    (["run.steps=0"], "run.steps must be at least 1, not 0"),
    ([f"run.dir={'x' * 300}", "run.resume=true"], ": File name too long"),
    (["+join=host:1"], "use torchrun --nproc-per-node=WORKERS -m recycle_pp.train +join=host:1"),
]


@pytest.mark.parametrize(("arguments", "sentence"), MISTAKES, ids=[" ".join(given) for given, _ in MISTAKES])
def test_a_mistake_in_train_is_reported_in_one_sentence_before_torch_is_imported(arguments, sentence, tmp_path):
    done = run("train", *arguments, cwd=tmp_path, program=[sys.executable, "-c", NO_TORCH])
    # A busy machine also prints progress lines, which end with seconds.
    said = [line for line in done.stdout.splitlines() if not line.endswith(" s)")]
    assert (done.returncode, said) == (2, [])
    assert done.stderr.startswith("recycle_pp: ")
    assert done.stderr.count("\n") == 1
    assert sentence in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_under_a_launcher_train_runs_one_rank(tmp_path):
    done = run("train", "parallel=2x1", cwd=tmp_path, RANK="0", WORLD_SIZE="5")
    assert done.returncode == 2
    assert "2 * 1 = 2 workers, but 5 processes were launched" in done.stderr


@pytest.mark.slow
@pytest.mark.torchrun
def test_train_starts_the_workers_and_a_resume_reads_their_number_from_the_run(tmp_path):
    first = run("train", *TINY, "run.steps=2", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert "recycle_pp: starts torchrun for 2 workers (parallel=2x1)" in first.stdout
    again = run("train", "run.dir=run", "run.steps=3", "run.resume=true", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "starts torchrun for 2 workers (parallel=2x1)" in again.stdout
    folder = RunFolder(tmp_path / "run")
    assert [line["step"] for line in folder.lines(folder.metrics)] == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.torchrun
def test_the_config_of_a_resumed_run_trains_to_the_same_weights(tmp_path):
    words = ["parallel=1x1", *TINY[1:], "run.standby=off"]
    for more in (["run.steps=2"], ["run.steps=4", "run.resume=true"]):
        assert run("train", *words, *more, cwd=tmp_path).returncode == 0
    again = run("train", "run/config.yaml", "run.dir=again", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    first, second = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("run", "again"))
    assert first["weights_sha256"] == second["weights_sha256"] is not None
    refused = run("train", "run/config.yaml", cwd=tmp_path)
    assert (refused.returncode, "run.dir=run contains another run" in refused.stderr) == (2, True)


@pytest.mark.slow
@pytest.mark.torchrun
def test_the_file_of_init_trains_through_a_death_with_the_bits_of_one_worker(tmp_path):
    words = ["parallel=2x2", "parallel.microbatches=2", "numerics=reproducible", *TINY[1:]]
    init = run("init", "run.yaml", *words, cwd=tmp_path)
    assert init.returncode == 0, init.stderr
    more = ["run.steps=4", "run.standby=off"]
    for dir, words in (
        ("hit", ["+fail_at=2:1.1@backward"]),
        ("alone", ["parallel=1x1", "parallel.microbatches=4", "model.split=null"]),
    ):
        done = run("train", "run.yaml", f"run.dir={dir}", *more, *words, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    hit, alone = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("hit", "alone"))
    assert (hit["deaths"], alone["deaths"]) == (1, 0)
    assert hit["weights_sha256"] == alone["weights_sha256"] is not None


def without_output(*arguments, cwd, how):
    """Runs a command whose standard output is closed, or is a pipe without a reader."""
    if how == "closed":
        return run("-c", 'exec "$@" >&-', "sh", *RECYCLE, *arguments, cwd=cwd, program=["sh"])
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as pipe:
        return subprocess.run(
            [*RECYCLE, *arguments],
            env=ENVIRONMENT, cwd=cwd, stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=120, check=False,
        )  # fmt: skip


@pytest.mark.parametrize("how", ["closed", "pipe"])
@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["status", "run"], ["doctor", "run"]])
def test_a_command_whose_output_nobody_reads_prints_no_error(arguments, how, tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.make()
    folder.config.write_text("run: {steps: 3}\n")
    done = without_output(*arguments, cwd=tmp_path, how=how)
    codes = (0,) if "--help" in arguments or how == "pipe" else (0, 1, 2)  # depends on the state of the run
    assert (done.returncode in codes, done.stderr) == (True, "")


@pytest.mark.parametrize("how", ["closed", "pipe"])
def test_a_mistake_in_train_is_reported_even_if_nobody_reads_the_output(how, tmp_path):
    done = without_output("train", "run.steps=0", cwd=tmp_path, how=how)
    assert (done.returncode, done.stderr) == (2, "recycle_pp: run.steps must be at least 1, not 0\n")


@pytest.mark.torchrun
@pytest.mark.parametrize("how", ["closed", pytest.param("pipe", marks=pytest.mark.slow)])
def test_a_job_trains_and_resumes_even_if_nobody_reads_its_output(how, tmp_path):
    words = ["parallel=1x1", *TINY[1:], "run.standby=off"]
    for more in (["run.steps=1"], ["run.steps=2", "run.resume=true"]):
        done = without_output("train", *words, *more, cwd=tmp_path, how=how)
        assert done.returncode == 0, done.stderr
    folder = RunFolder(tmp_path / "run")
    assert [line["step"] for line in folder.lines(folder.metrics)] == [0, 1]


@pytest.mark.torchrun
def test_one_worker_needs_no_torchrun(tmp_path):
    done = run("train", "parallel=1x1", *TINY[1:], "run.steps=1", "run.standby=off", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "torchrun" not in done.stdout


ENDINGS = {
    "Ctrl-C": (os.killpg, signal.SIGINT, True, 130),  # to the foreground process group, like a terminal
    "SIGTERM": (os.kill, signal.SIGTERM, True, 143),  # only to the command, like a scheduler
    "a closed terminal": (os.kill, signal.SIGHUP, True, 143),
    "SIGTERM at the start": (os.kill, signal.SIGTERM, False, 143),
}


@pytest.mark.torchrun
@pytest.mark.parametrize("how", [pytest.param(how, marks=[pytest.mark.slow] * (how == "SIGTERM")) for how in ENDINGS])
def test_a_signal_ends_train_with_its_code_and_a_checkpoint_and_leaves_no_process(how, tmp_path):
    send, number, after_a_step, code = ENDINGS[how]
    folder = RunFolder(tmp_path / "run")
    with open(tmp_path / "out", "w") as out:
        process = subprocess.Popen(
            [*RECYCLE, "train", *TINY, "run.steps=100000"],
            cwd=tmp_path, env=ENVIRONMENT, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    said, started = (tmp_path / "out").read_text, psutil.Process(process.pid)
    family = []

    def far_enough():
        family[:] = started.children(recursive=True)
        return folder.metrics.exists() and folder.lines(folder.metrics) if after_a_step else family

    try:
        deadline = time.monotonic() + 100
        while not far_enough():
            assert process.poll() is None and time.monotonic() < deadline, said()
            time.sleep(0.1)
        send(process.pid, number)
        assert process.wait(60) == code, said()
        left = psutil.wait_procs(family, timeout=10)[1]
        assert not left, (left, said())
    finally:
        for child in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        if process.poll() is None:
            process.kill()
            process.wait()
    assert "Traceback" not in said()
    assert any(folder.checkpoints.glob("step-*/about.json")) or not after_a_step, said()
