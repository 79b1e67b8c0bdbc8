"""A new coordinator that finds no worker decides whether the job is lost or has not started yet."""

import asyncio
import io
import json
import os
import threading

from recycle_pp.config.settings import Control, Parallel, Run, Settings
from recycle_pp.coordinator.coordinator import Coordinator
from recycle_pp.telemetry import background
from recycle_pp.telemetry.event_log import EventLog
from recycle_pp.telemetry.history import History
from recycle_pp.telemetry.progress import Progress
from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.wire.messages.agreement import Leader, Takeover


class Agreed:
    """The agreement of a leader whose supervisors are all gone."""

    def __init__(self, generation):
        self._generation = generation

    async def supervisors(self):
        return {}

    async def generation(self):
        return self._generation

    async def agree(self, generation, supervisors):
        return 1

    async def confirm(self, held):
        return 1


def take_over(folder, generation, code=1):
    """Runs a new coordinator. Returns the reason why the job stops, and the names of its events."""
    settings = Settings(
        run=Run(steps=9, dir=str(folder)), parallel=Parallel(1, 1, microbatches=1), control=Control(suspicion=0.1)
    )
    run = RunFolder(folder)

    async def main():
        progress = Progress(steps=9, workers=1, stream=io.StringIO())
        successor = Coordinator(
            settings,
            run,
            EventLog(run.events, steps=9),
            progress,
            Agreed(generation),
            Leader(1, 0, "127.0.0.1", 1),
            takeover=Takeover(0, 0, 3.0, 4.0),
            token="",
        )
        assert await asyncio.wait_for(successor.run(), 60.0) == code
        return successor.state.lifecycle.reason

    reason = asyncio.run(main())
    events = run.events.read_text().splitlines() if run.events.exists() else []
    return reason, [json.loads(line)["event"] for line in events]


def test_a_job_without_an_agreed_generation_has_begun_no_step_and_is_not_lost(tmp_path):
    reason, events = take_over(tmp_path, generation=-1)
    assert "were lost at once" not in reason and events[2] == "death_detected"


def test_a_job_that_has_begun_is_lost_and_the_newest_checkpoint_is_named(tmp_path):
    reason, events = take_over(tmp_path, generation=0)
    assert reason == "the coordinator and all workers were lost at once; there is no checkpoint to continue from"
    assert events == ["coordinator_lost", "coordinator_elected", "stopped"]
    for name in ("step-000003", "step-000006", "step-000009.tmp"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    reason, _ = take_over(tmp_path, generation=0)
    assert reason.endswith("start again with run.resume=true, which continues from checkpoint step-000006")


def test_a_supervisor_that_was_suspended_until_the_job_had_finished_leaves_its_records_alone(tmp_path):
    (tmp_path / "checkpoints" / "step-000009").mkdir(parents=True)
    assert take_over(tmp_path, generation=0, code=0) == ("", [])


def test_a_folder_that_cannot_be_written_does_not_change_the_decision(tmp_path):
    for generation in (-1, 0):
        reason, _ = take_over(tmp_path / "gone", generation)
        assert ("were lost at once" in reason) == (generation == 0)


def test_unreadable_records_and_profiles_do_not_change_the_decision(tmp_path, monkeypatch):
    """The disk does not answer, or the records are those of another job."""
    RunFolder(tmp_path).metrics.write_text('{"step": 7, "loss": 1.0}\n')
    answers = threading.Event()
    monkeypatch.setattr(background, "READ_SECONDS", 0.05)
    monkeypatch.setattr(History, "read", lambda run: answers.wait(60.0))
    os.mkfifo(tmp_path / "profile.json")
    reason, events = take_over(tmp_path, generation=-1)
    answers.set()
    assert "were lost at once" not in reason and events[:2] == ["coordinator_lost", "coordinator_elected"]
