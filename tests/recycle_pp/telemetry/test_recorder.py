"""Messages of workers become ordered records, even if they arrive out of order."""

import asyncio
import io
import json
import threading
import time

import pytest
from recycle_schedules import OpKind

from recycle_pp.config.settings import Parallel, Run, Settings
from recycle_pp.coordinator.job import new_job
from recycle_pp.protocol.takeover import find
from recycle_pp.telemetry import background
from recycle_pp.telemetry.event_log import EventLog
from recycle_pp.telemetry.events.workers import GivenUp, Respawned
from recycle_pp.telemetry.history import History
from recycle_pp.telemetry.progress import Progress
from recycle_pp.telemetry.recorder import Recorder
from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.timing.packing import pack
from recycle_pp.timing.span_tables import SpanTables
from recycle_pp.wire.messages.agreement import Takeover
from recycle_pp.wire.messages.lifecycle import Ready
from recycle_pp.wire.messages.steps import Commit, Measured
from recycle_pp.wire.messages.supervisors import Death
from recycle_pp.wire.messages.workers import State


@pytest.fixture
def recorded(tmp_path):
    """(recorder of a job of two workers, the workers, function that returns the recorded samples by step)."""
    settings = Settings(run=Run(steps=3, dir=str(tmp_path), sample_log=True), parallel=Parallel(2, 1, microbatches=1))
    run = RunFolder(tmp_path)
    progress = Progress(steps=3, workers=2, stream=io.StringIO())
    job = new_job(settings, 0)
    job.live |= {*job.assignment}
    recorder = Recorder(settings, run, EventLog(run.events, steps=3, say=progress.say), progress, job, SpanTables())

    def samples():
        asyncio.run(recorder.flushed(10.0))
        return {line["step"]: line["samples"] for line in map(json.loads, run.samples.read_text().splitlines())}

    yield recorder, list(job.workers.values()), samples
    recorder.close()


def measured(step, samples):
    return Measured(step=step, spans=pack([]), samples=samples, logged_bytes=0, lr=0.1, cpu=step + 1.0)


def test_the_line_of_a_step_has_the_speed_and_the_memory_of_the_workers(recorded):
    recorder, workers, samples = recorded
    recorder.described(Ready(("host", 1), "cpu", units={-1: [("embedding", 500)], 0: [("layers.0", 1000)]}))
    spans = pack([(OpKind.FORWARD, 0, 0, 1.0, 1.5), (OpKind.BACKWARD, 0, 0, 1.5, 1.75)])
    for worker, memory in zip(workers, ((5_000, 7_000), (6_000, 6_500)), strict=True):
        message = Measured(0, spans, [], 0, 0.1, 1.0, memory)
        recorder._spans.add(worker, message)
        recorder.measured(worker, message)
    recorder.record_missing_commit(Commit(0, 0, scale=1.0, norm=1.0, loss=2.0))
    recorder.close()
    samples()  # waits for the files
    line = json.loads(recorder._run.metrics.read_text())
    assert (line["peak_bytes"], line["reserved_bytes"]) == (6_000, 7_000)
    assert (line["forward_seconds"], line["backward_seconds"]) == (0.5, 0.25)
    assert line["tokens_per_second_per_worker"] == line["tokens_per_second"] / 2
    model = Settings().model
    each = 6 * 1000 + 12 * model.layers * model.width * model.sequence
    assert line["tflops"] == pytest.approx(each * line["tokens_per_second"] / 2 / 1e12)
    assert "mfu" not in line, "a CPU has no peak"


def test_a_new_process_in_the_role_of_an_understudy_does_not_make_cpu_seconds_negative(recorded):
    recorder, workers, samples = recorded
    for step, cpu in enumerate((1e6, 1e6 + 5.0, 7.0, 9.0)):
        recorder.measured(workers[0], Measured(step, pack([]), [], 0, 0.1, cpu))
        recorder.record_missing_commit(Commit(0, step, scale=1.0, norm=1.0, loss=2.0))
    samples()  # waits for the files
    seconds = [line["cpu_seconds"] for line in lines(recorder._run.metrics)]
    assert seconds == pytest.approx([0.0, 5.0, 0.0, 2.0], abs=0.9)


def test_samples_of_a_step_are_kept_even_if_a_worker_has_sent_those_of_the_next_step(recorded):
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


def test_a_death_is_written_once_before_its_effects_and_its_cause_is_added_later(recorded, tmp_path):
    """A worker that was restarted by `+rejoin_at` dies before the cause of its first death is known."""
    recorder, (worker, other), _ = recorded
    first, second = (0, 0), (0, 1)
    recorder.death(worker, first, now=1.0)
    recorder.event(Respawned(worker=str(worker), respawns=1))
    recorder.death(worker, second, now=2.0)
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


SEGFAULT = Death("signal", "SIGSEGV")


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def take_over(recorder, committed):
    """A new coordinator takes over. Of members 0 and 1, only member 1 has survived."""
    commit = Commit(0, committed, scale=1.0, norm=1.0, loss=2.0)
    state = State(0, recorder._job.workers, committed=committed, commit=commit, agreed=(0, 0))
    found = find({1: state})
    recorder._job.committed = committed
    asyncio.run(recorder.read_history())
    recorder.took_over(Takeover(1, 0, lost_at=3.0, elected_at=4.0), found)
    recorder.found_dead(found.members[0], (0, 0), now=5.0)
    recorder.explain_death((0, 0), SEGFAULT)
    recorder.given_up((0, 0), respawns=3)
    recorder.record_missing_commit(found.commit)


def write_history(run, dead):
    """Writes a history of steps 0 to 2 and two deaths. dead: the worker that has died and was given up."""
    event = {"time": 1.0, "step": 0, "generation": 0, "worker": str(dead)}
    names = ("started", "death_detected", "respawned", "death_detected", "given_up")
    run.events.write_text("".join(json.dumps({**event, "event": name}) + "\n" for name in names))
    run.metrics.write_text("".join(json.dumps({"step": step, "loss": 2.0}) + "\n" for step in range(3)))


def test_a_new_coordinator_continues_the_files_and_counters_of_the_lost_one(recorded, tmp_path):
    recorder, (dead, _), _ = recorded
    run = RunFolder(tmp_path)
    write_history(run, dead)
    take_over(recorder, committed=1)
    recorder.finished({})
    asyncio.run(recorder.flushed(10.0))
    named = [event["event"] for event in lines(run.events)]
    assert named[5:] == ["coordinator_lost", "coordinator_elected", "finished"], "the death is not written again"
    assert [line["step"] for line in lines(run.metrics)] == [0, 1], (
        "step 2 is rolled back, and step 1 is not written again"
    )
    assert json.loads(run.summary.read_text())["deaths"] == 2


def test_the_first_step_of_a_new_coordinator_began_with_the_last_commit_of_the_lost_one(recorded, tmp_path):
    recorder, (dead, _), _ = recorded
    run = RunFolder(tmp_path)
    write_history(run, dead)
    commits = [{"step": step, "time": time.time() - 100 + 40 * step} for step in range(2)]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in commits))
    take_over(recorder, committed=2)
    recorder.finished({})
    asyncio.run(recorder.flushed(10.0))
    assert lines(run.metrics)[-1]["step_seconds"] == pytest.approx(60, abs=20)


def test_an_unrecorded_death_is_recorded_by_the_next_coordinator(recorded, tmp_path):
    recorder, (dead, live), _ = recorded
    run = RunFolder(tmp_path)
    write_history(run, live)
    take_over(recorder, committed=2)
    recorder.finished({})
    asyncio.run(recorder.flushed(10.0))
    named = [(event["event"], event.get("worker")) for event in lines(run.events)]
    assert named[7:] == [("death_detected", str(dead)), ("given_up", str(dead)), ("finished", None)]
    assert json.loads(run.summary.read_text())["deaths"] == 3


@pytest.mark.parametrize("fails", ["late", "error"])
def test_a_new_coordinator_does_not_wait_for_a_disk_that_does_not_answer(recorded, tmp_path, monkeypatch, fails):
    recorder, _, _ = recorded
    run, answers = RunFolder(tmp_path), threading.Event()

    def read(folder):
        answers.wait(60.0 if fails == "late" else 0.0)
        raise OSError("no answer")

    monkeypatch.setattr(background, "READ_SECONDS", 0.05)
    monkeypatch.setattr(History, "read", read)
    take_over(recorder, committed=2)
    answers.set()
    recorder.finished({})
    asyncio.run(recorder.flushed(10.0))
    named = [event["event"] for event in lines(run.events)]
    assert named == ["coordinator_lost", "coordinator_elected", "death_detected", "given_up", "finished"]
    assert [line["step"] for line in lines(run.metrics)] == [2]
