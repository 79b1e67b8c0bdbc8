"""The commands in docs/simulate.md run unchanged."""

import re
import shlex
from pathlib import Path

import pytest

from recycle_pp.simulate import main

ROOT = Path(__file__).parents[3]
COMMANDS = re.findall(
    r"^python -m recycle_pp\.simulate (.*?)(?: *#.*)?$", (ROOT / "docs" / "simulate.md").read_text(), flags=re.MULTILINE
)
LONG = ("--pipelines 125", "12 32 64", "--replay", "--best", "--days 30")
"""Commands that take ten seconds or more."""


def test_there_are_commands():
    assert len(COMMANDS) >= 4


@pytest.mark.parametrize(
    "command",
    [pytest.param(c, marks=pytest.mark.slow) if any(word in c for word in LONG) else c for c in COMMANDS],
)  # fmt: skip
def test_the_documented_command_runs(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("examples", "bench"):
        (tmp_path / name).symlink_to(ROOT / name)
    quick = [] if "--plans" in command or "--days" in command else ["--plans", "4"]
    assert main([*shlex.split(command), *quick]) == 0, capsys.readouterr().err
