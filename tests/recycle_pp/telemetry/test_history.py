"""A new coordinator reads the records of earlier coordinators."""

import json

import pytest

from recycle_pp.telemetry import history
from recycle_pp.telemetry.history import History
from recycle_pp.telemetry.run_folder import RunFolder


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_an_empty_folder_has_no_history(tmp_path):
    assert History.read(RunFolder(tmp_path)) == History()


def test_deaths_stalls_and_steps_since_the_start_are_read(tmp_path):
    run = RunFolder(tmp_path)
    event = {"time": 1.0, "step": 3, "generation": 0, "worker": None}
    write(
        run.events,
        {**event, "event": "death_detected", "worker": "0.0"},  # before the resume
        {**event, "event": "started"},
        {**event, "event": "death_detected", "worker": "1.2", "detail": "SIGKILL"},
        {**event, "event": "death_detected", "worker": "1.1"},
        {**event, "event": "resumed", "stall_seconds": 0.25, "lost_ops": 4},
        {**event, "event": "rejoined", "worker": "1.1"},
    )
    write(run.metrics, *({"step": step, "loss": 2.0 - step, "cpu_seconds": 0.5} for step in range(3)))
    with run.metrics.open("a") as file:
        file.write('{"step": 3, "lo')  # the coordinator died while it wrote this line
    found = History.read(run)
    assert (found.deaths, found.stalls, found.lost_ops) == (2, [0.25], 4)
    assert found.dead == {"0.0", "1.2"}
    assert (found.step, found.loss, found.cpu_steps) == (2, 0.0, [0.5] * 3)


@pytest.mark.parametrize("size", [1, 100, 130, 1000])
def test_only_the_newest_steps_and_all_events_of_a_long_run_are_read(size, tmp_path, monkeypatch):
    monkeypatch.setattr(history, "STEP_BYTES", size)
    run = RunFolder(tmp_path)
    event = {"time": 1.0, "step": 3, "generation": 0, "worker": None}
    write(run.events, *({**event, "event": "death_detected", "worker": "0.0"} for _ in range(50)))
    write(run.metrics, *({"step": step, "cpu_seconds": float(step)} for step in range(1000, 2000)))
    found, count = History.read(run), size // len('{"step": 1999, "cpu_seconds": 1999.0}\n')
    assert found.deaths == 50 and found.cpu_steps == [float(step) for step in range(2000 - count, 2000)]
