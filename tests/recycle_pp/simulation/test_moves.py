"""Costs of moves of layers, read from a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recycle_pp.simulation.moves import Moves, measured, moves_of
from recycle_pp.telemetry.events.event import Event
from recycle_pp.telemetry.events.layers import Rebalanced, Rebalancing
from recycle_pp.telemetry.events.workers import Rejoined
from recycle_pp.telemetry.run_reader import RunReader

PLANNED = {"step_seconds": 2.0, "new_step_seconds": 1.6, "gain_seconds": 9.0, "cost_seconds": 1.0, "bytes": 1000}
LAYERS = {"before": [2, 2], "layout": [3, 1]}
BEGUN = Rebalancing(step=4, outage_seconds=60.0, receivers=["0.0", "1.0"], **PLANNED, **LAYERS)
MOVED = Rebalanced(step=6, first_step=6, seconds=3.0, stall_seconds=0.04, **PLANNED, **LAYERS)


def run_with(path: Path, events: list[Event], steps: list[float]) -> Path:
    path.mkdir()
    (path / "events.jsonl").write_text("".join(json.dumps(event.line()) + "\n" for event in events))
    lines = ({"step": step, "step_seconds": seconds} for step, seconds in enumerate(steps))
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_steps_during_a_move_are_compared_with_undisturbed_ones_after_it_by_their_plans(tmp_path):
    """Steps take a tenth longer than planned, and 1.2 times as long during the move. A worker is back in step 11."""
    back = Rejoined(step=11, worker="0.1")
    steps = [2.2] * 4 + [1.2 * 2.2] * 2 + [5.0] + [1.1 * 1.6] * 4 + [9.0] * 4
    (move,) = moves_of(RunReader(run_with(tmp_path / "run", [BEGUN, MOVED, back], steps)))
    assert move["slowed"] == pytest.approx(0.2)
    moves = Moves.load(tmp_path / "run")
    assert (moves.steps, moves.switch, moves.source) == (1.5, 0.04, f"1 move of {tmp_path / 'run'}")


def test_without_enough_steps_after_a_move_the_trainer_s_assumption_is_used(tmp_path):
    moves = Moves.load(run_with(tmp_path / "run", [BEGUN, MOVED], [2.0] * 8))
    assert moves.slowed == 0.03 and moves.steps == 1.5


def test_a_run_without_moves_gets_one_sentence(tmp_path):
    with pytest.raises(ValueError, match="no layers have moved in this run"):
        Moves.load(run_with(tmp_path / "run", [BEGUN], [2.0] * 8))


def test_the_committed_measurement_is_a_file_of_the_bench(tmp_path):
    assert len(measured().stalls) >= 8 and 0 < measured().switch < 1 and 0 <= measured().slowed < 0.2
