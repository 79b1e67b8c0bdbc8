"""The commands in the README print the output that it shows."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from recycle_pp.cli import COMMANDS

ROOT = Path(__file__).resolve().parent.parent
BLOCKS = re.findall(r"^```\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.DOTALL | re.MULTILINE)
LINES = [line.partition("  #")[0].strip() for block in BLOCKS for line in block.splitlines()]
COMMAND_LINES = [line for line in LINES if line.startswith("recycle ")]
BIN = Path(sys.executable).parent


def recycle(line, folder):
    """Runs one command from the README in `folder`, which contains the repository's examples."""
    name, *arguments = shlex.split(line)[1:]
    command = [sys.executable, "-m", "recycle_pp.cli", name, *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PATH": f"{BIN}:{os.environ['PATH']}"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The quick start: its folder and its output."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "examples").symlink_to(ROOT / "examples")
    line = next(line for line in COMMAND_LINES if "run.dir=runs/demo" in line)
    found = recycle(line, folder)
    assert found.returncode == 0, found.stderr
    return folder, found.stdout


def test_every_named_command_exists():
    assert COMMAND_LINES and {line.split()[1] for line in COMMAND_LINES} <= COMMANDS.keys()


def test_the_quick_start_prints_the_shown_output(demo):
    _, printed = demo
    shown = next(block for block in BLOCKS if "the run is finished" in block).splitlines()
    lines = [_shape(line) for line in printed.splitlines()]
    for line in shown:
        begin, _, end = _shape(line).partition(" ... ")
        found = any(of.startswith(begin) and of.endswith(end or begin) for of in lines)
        assert line.strip() == "..." or found, f"{line!r} is not in\n{printed}"


def test_the_commands_after_the_quick_start_read_its_run(demo):
    folder, _ = demo
    lines = [line for line in COMMAND_LINES if "runs/demo" in line and "train" not in line]
    assert len(lines) == 4
    for line in lines:
        found = recycle(line, folder)
        code = 1 if " doctor " in line else 0  # doctor warns that a worker was killed
        assert found.returncode == code and found.stdout, (line, found.stderr)


def test_plan_and_simulate_run_as_written(tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    lines = [line for line in COMMAND_LINES if line.split()[1] in ("plan", "simulate")]
    assert len(lines) == 2
    for line in lines:
        found = recycle(line, tmp_path)
        assert found.returncode == 0 and found.stdout, (line, found.stderr)


def _shape(line):
    """The line with every number, id and hash replaced by 0, and with single spaces."""
    return re.sub(r"\s+", " ", re.sub(r"\b[0-9a-f]{64}\b|\d[\d.,]*", "0", line)).strip()
