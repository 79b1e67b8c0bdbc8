"""A new coordinator reads the records of earlier coordinators."""

import json

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
        file.write('{"step": 3, "lo')  # its coordinator died while writing
    history = History.read(run)
    assert (history.deaths, history.stalls, history.lost_ops) == (2, [0.25], 4)
    assert history.dead == {"0.0", "1.2"}
    assert (history.step, history.loss, history.cpu_steps) == (2, 0.0, [0.5] * 3)
