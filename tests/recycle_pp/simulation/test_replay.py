"""The simulation compared with a real job of emulated workers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from recycle_pp.simulate import main
from recycle_pp.simulation.availability import Availability, Change
from recycle_pp.simulation.compare import compare
from recycle_pp.simulation.costs import Costs
from recycle_pp.simulation.job import Job

TRACE = Path(__file__).parents[3] / "examples" / "spot-trace-24gpu.csv"


def test_a_respawned_process_returns_to_its_own_role():
    """Two workers of stage 0 and one of stage 1 die; the latter returns."""
    job = Job.of(pipelines=3, stages=2, microbatches=6, layers=8)
    there = Availability(
        6, 1e5, (Change(0.0, 0, False), Change(0.0, 2, False), Change(1.0, 1, False), Change(2.0, 1, True))
    )
    found = compare(job, there, Costs(), ["rerouted", "respawned"]).outcomes
    assert found["respawned"].relative < 0.8 * found["rerouted"].relative


def test_unequal_stages_cannot_be_emulated(capsys):
    flags = f"--trace {TRACE} --pipelines 2 --stages 2 --microbatches 4 --durations F=0.1/0.2 --layers 2 --replay 5s"
    assert main(flags.split()) == 2
    assert "--replay: the job's stages take different times, which cannot be emulated" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.torchrun
def test_a_replay_agrees_with_its_simulation(capsys):
    """They agree within 15 % in a minute, with few workers on a busy machine. docs/simulate.md has a longer replay."""
    flags = f"--trace {TRACE} --pipelines 3 --stages 2 --microbatches 6 --durations F=0.05,I=0.05,W=0.05 --replay 60s"
    assert main(flags.split()) == 0
    out = capsys.readouterr().out
    kills, measured, difference = re.search(r"(\d+) kills; (\d+) steps measured, .*: ([+-][\d.]+)%", out).groups()
    assert int(kills) > 3 and int(measured) > 20
    assert abs(float(difference)) < 15, out
