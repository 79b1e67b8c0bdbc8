"""Messages of workers become records, although they arrive out of order."""

import asyncio
import io
import json

import pytest

from recycle_pp.config.settings import Parallel, Run, Settings
from recycle_pp.coordinator.job import new_job
from recycle_pp.telemetry.event_log import EventLog
from recycle_pp.telemetry.events.workers import GivenUp, Respawned
from recycle_pp.telemetry.progress import Progress
from recycle_pp.telemetry.recorder import Recorder
from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.timing.packing import pack
from recycle_pp.timing.span_tables import SpanTables
from recycle_pp.wire.messages.steps import Commit, Measured
from recycle_pp.wire.messages.supervisors import Death


@pytest.fixture
def recorded(tmp_path):
    """(recorder of a job of two workers, the workers, function that returns the samples it has written)."""
    settings = Settings(run=Run(steps=3, dir=str(tmp_path), sample_log=True), parallel=Parallel(2, 1, microbatches=1))
    run = RunFolder(tmp_path)
    progress = Progress(steps=3, workers=2, stream=io.StringIO())
    job = new_job(settings, 0)
    job.live |= {*job.problem.workers()}
    recorder = Recorder(settings, run, EventLog(run.events, steps=3, say=progress.say), progress, job, SpanTables())

    def samples():
        asyncio.run(recorder.flushed(10.0))
        return {line["step"]: line["samples"] for line in map(json.loads, run.samples.read_text().splitlines())}

    yield recorder, sorted(job.live), samples
    recorder.close()


def measured(step, samples):
    return Measured(step=step, spans=pack([]), samples=samples, logged_bytes=0, lr=0.1, cpu=step + 1.0)


def test_samples_of_a_step_are_kept_although_a_worker_has_sent_those_of_the_next_step(recorded):
    """A coordinator dies between a commit and its line. The next one first receives the measurements of a worker that
    is a step ahead, because the optimizer is staggered."""
    recorder, (ahead, behind), samples = recorded
    recorder.measured(behind, measured(0, [3, 7]))
    recorder.measured(ahead, measured(0, [3, 7]))
    recorder.measured(ahead, measured(1, [1, 9]))
    recorder.record_missing_commit(Commit(0, 0, scale=1.0, norm=1.0, loss=2.0))
    recorder.measured(behind, measured(1, [1, 9]))
    recorder.record_missing_commit(Commit(0, 1, scale=1.0, norm=1.0, loss=2.0))
    assert samples() == {0: [3, 7], 1: [1, 9]}


def test_a_death_is_written_once_before_its_effects_and_explained_when_its_cause_is_known(recorded, tmp_path):
    """A worker that `+rejoin_at` has restarted dies before the cause of its first death is known."""
    recorder, (worker, other), _ = recorded
    first = recorder.death(worker, now=1.0)
    recorder.event(Respawned(worker=str(worker), respawns=1))
    second = recorder.death(worker, now=2.0)
    recorder.explain_death(second, Death("signal", "SIGKILL"))
    recorder.event(GivenUp(worker=str(other), respawns=0))

    def events():
        lines = map(json.loads, RunFolder(tmp_path).events.read_text().splitlines())
        return [(event["event"], event.get("cause")) for event in lines]

    assert events() == []
    recorder.suppose_death(first, Death("unknown", "its supervisor has not reported the cause"))
    recorder.suppose_death(second, Death("unknown", "its supervisor has not reported the cause"))
    written = [("death_detected", "unknown"), ("respawned", None), ("death_detected", "signal"), ("given_up", None)]
    assert events() == written
    recorder.explain_death(first, Death("signal", "SIGSEGV"))
    recorder.explain_death(second, Death("signal", "SIGKILL"))
    assert events() == [*written, ("death_explained", "signal")]
