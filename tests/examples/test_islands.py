"""The example with two islands, launched the way users launch it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from recycle_pp.islands.__main__ import state
from recycle_pp.storage.store import Store
from recycle_pp.telemetry.island_figures import IslandRounds
from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.telemetry.run_reader import RunReader

EXAMPLE = Path(__file__).parents[2] / "examples" / "islands.sh"


def launched(folder, *settings):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ["sh", EXAMPLE, folder, *settings]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.slow
@pytest.mark.torchrun
def test_two_islands_meet_in_a_folder_and_record_their_rounds(tmp_path):
    short = ["run.steps=12", "run.validate_every=0", "islands.steps=3", "islands.max_local=3"]
    done = launched(tmp_path / "islands", *short, "islands.egress_per_gb=0.1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal on frankfurt, oregon" in done.stdout and "DIFFERENT" not in done.stdout
    found = state(Store(str(tmp_path / "islands" / "store")))
    assert [each["round"] for each in found["rounds"]] == [0, 1, 2]
    for name in ("oregon", "frankfurt"):
        rounds = IslandRounds(name)
        for event in RunReader(RunFolder(tmp_path / "islands" / name)).events():
            rounds.follow(event)
        figures = rounds.figures()
        assert figures is not None and figures.rounds == 3 and figures.norm and figures.dollars
        assert figures.received_bytes > figures.sent_bytes > 50_000


@pytest.mark.slow
@pytest.mark.torchrun
def test_the_script_fails_if_an_island_fails(tmp_path):
    done = launched(tmp_path / "islands", "run.stepz=3")
    assert done.returncode == 1 and "run.stepz" in (tmp_path / "islands" / "oregon.log").read_text()
