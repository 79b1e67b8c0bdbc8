"""If a coordinator is lost while the disk of the run folder does not answer, the next one writes its lines."""

import asyncio
import io
import json
import threading

import pytest

from recycle_pp.config.settings import Parallel, Run, Settings
from recycle_pp.coordinator.job import new_job
from recycle_pp.protocol.events import LinksBroken, Outcome
from recycle_pp.protocol.takeover import find
from recycle_pp.telemetry import unwritten, warn
from recycle_pp.telemetry.event_log import EventLog
from recycle_pp.telemetry.events.workers import Spawned
from recycle_pp.telemetry.lines import Lines
from recycle_pp.telemetry.progress import Progress
from recycle_pp.telemetry.recorder import Recorder
from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.telemetry.unwritten import CHUNK, Unwritten
from recycle_pp.timing.packing import pack
from recycle_pp.timing.span_tables import SpanTables
from recycle_pp.wire.frames import encode_body
from recycle_pp.wire.messages.agreement import Takeover
from recycle_pp.wire.messages.steps import Commit, Measured
from recycle_pp.wire.messages.supervisors import TO_SUPERVISOR, Death
from recycle_pp.wire.messages.workers import State


class Node:
    """A supervisor that may become the coordinator. `permits`: number of calls that its disk lets through."""

    def __init__(self, folder, term):
        self.run, self.term = RunFolder(folder), term
        self.permits, self._changed = 0, threading.Condition()
        self.run.later.permitted = self._wait

    def coordinate(self, others, first_step=0):
        settings = Settings(run=Run(steps=99, sample_log=True), parallel=Parallel(2, 1, microbatches=1))
        self.job = new_job(settings, first_step)
        self.job.live |= {*self.job.assignment}
        progress = Progress(steps=99, workers=2, stream=io.StringIO())
        log = EventLog(self.run.events, 99, later=self.run.later, term=lambda: self.term)
        self.recorder = Recorder(settings, self.run, log, progress, self.job, SpanTables())
        self.recorder.share(lambda message: [node.receive(message) for node in others])
        return self

    def receive(self, message):
        self.run.kept.receive(TO_SUPERVISOR.decode(encode_body(message)))

    def commit(self, *steps):
        """Commits these steps. Each has an event, and every third one is validated."""
        for step in steps:
            self.recorder.measured(self.job.workers[0], Measured(step, pack([]), [2 * step, 2 * step + 1], 0, 0.1, 1.0))
            self.job.committed = step
            self.recorder.event(Spawned(worker="0.0", rank=0, pid=step, host="here"))
            commit = Commit(0, step, scale=1.0, norm=1.0, loss=float(step), evaluate=step % 3 == 0)
            self.note(event="committed", commit=commit)
            if step % 3 == 0:
                self.note(event="evaluated", val_loss=step + 0.5, microbatches=2)

    def note(self, **note):
        self.recorder.handled(LinksBroken(), Outcome(sends=[], notes=[note]))

    def take_over(self, others, committed):
        self.coordinate(others, committed + 1)
        commit = Commit(0, committed, scale=1.0, norm=1.0, loss=float(committed))
        self.job.committed = committed
        asyncio.run(self.recorder.read_history())
        found = find({1: State(0, self.job.workers, committed=committed, commit=commit, agreed=(0, 0))})
        self.recorder.took_over(Takeover(1, 0, lost_at=3.0, elected_at=4.0), found)
        self.recorder.record_missing_commit(commit)
        return self

    def answers(self, calls=10**6):
        """Lets the disk answer again, or only this number of calls."""
        with self._changed:
            self.permits += calls
            self._changed.notify()
        if calls < 10**6:
            while self.permits:
                assert not self.run.later.flush(0.001)
        return self

    def freezes(self):
        assert self.run.later.flush(10.0)
        with self._changed:
            self.permits = 0
        return self

    def dies(self):
        """Ends the node, so that the rest of its queue is never written."""
        with self._changed:
            self.permits = -1
            self._changed.notify()
        assert self.run.later.flush(10.0)

    def _wait(self):
        if threading.current_thread().name != "run folder":
            return False  # the threads for traces and the protocol log write nothing
        with self._changed:
            while self.permits == 0:
                self._changed.wait()
            if self.permits < 0:
                return False
            self.permits -= 1
            return True


@pytest.fixture
def nodes(tmp_path, monkeypatch):
    monkeypatch.setattr(unwritten, "LATE_SECONDS", 0.0)
    nodes = [Node(tmp_path, term) for term in range(3)]
    yield nodes
    for node in nodes:
        node.dies()


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def check(run, steps, spawned=None):
    """Checks that each file has one line for each step, and each event once, in order."""
    metrics, samples = run.lines(run.metrics), run.lines(run.samples)
    assert [line["step"] for line in metrics] == [line["step"] for line in samples] == [*range(steps)]
    assert [line["loss"] for line in metrics] == [*range(steps)]
    assert {line["step"]: line.get("val_loss") for line in metrics if line["step"] % 3 == 0} == {
        step: step + 0.5 for step in range(0, steps, 3)
    }
    assert [line["samples"] for line in samples] == [[2 * step, 2 * step + 1] for step in range(steps)]
    events = [event["pid"] for event in run.lines(run.events) if event["event"] == "spawned"]
    assert events == ([*range(steps)] if spawned is None else spawned)


@pytest.mark.parametrize("old", ["is killed", "writes a line before the new one", "writes a line after the new one"])
@pytest.mark.parametrize("back", ["before", "after"])
@pytest.mark.parametrize("written", [0, 1, 4])
def test_the_next_coordinator_writes_the_lines_that_the_lost_one_could_not(old, back, written, nodes):
    """back: whether the disk answers again before or after the take-over.

    written: number of lines that the old coordinator can still write
    """
    first, second, _ = nodes
    first.coordinate(nodes[1:]).answers().commit(*range(4))
    first.freezes().commit(*range(4, 20))
    first.answers(written)
    if old == "is killed":
        first.dies()
    if back == "before":
        second.answers()
    second.take_over(nodes[2:], committed=19)
    second.commit(20, 21)
    if old == "writes a line before the new one" and back == "after":
        first.answers(1)
        first.dies()
    second.answers().commit(22, 23)
    assert second.run.later.flush(10.0)
    if old != "is killed" and first.permits == 0:
        first.answers(1)
        first.dies()
    check(second.run, 24)
    second.recorder.retry()
    assert not nodes[2].run.kept.lines("metrics.jsonl"), "copies are dropped once the lines are written"


def test_two_coordinators_may_be_lost_while_the_disk_does_not_answer(nodes):
    first, second, third = nodes
    first.coordinate(nodes[1:]).answers().commit(*range(3))
    first.freezes().commit(*range(3, 10))
    first.dies()
    second.take_over([third], committed=9)
    second.commit(10, 11)
    second.dies()
    third.answers().take_over([], committed=11)
    third.commit(12)
    assert third.run.later.flush(10.0)
    check(third.run, 13)


def test_lines_that_the_old_coordinator_has_written_are_not_written_again(nodes):
    """The old coordinator is lost before the others have dropped their copies of these lines."""
    first, second, _ = nodes
    first.coordinate(nodes[1:]).answers().commit(*range(3))
    first.freezes().commit(*range(3, 10))
    first.recorder.share(lambda message: None)
    first.answers().commit(10, 11)
    first.freezes()
    first.dies()
    second.answers().take_over([], committed=11)
    assert second.run.later.flush(10.0)
    check(second.run, 12)
    assert {line["term"] for line in lines(second.run.metrics)} == {0}


def test_an_event_that_the_old_coordinator_writes_during_the_take_over_is_there_once(nodes, monkeypatch):
    first, second, _ = nodes
    first.coordinate(nodes[1:]).answers().commit(*range(3))
    first.freezes().commit(*range(3, 10))

    def find_and_wake(lines):
        find_written(lines)
        if lines._path == first.run.events:
            first.answers(1)  # writes its oldest line, the event of step 3

    find_written = Lines._find_written
    monkeypatch.setattr(Lines, "_find_written", find_and_wake)
    second.answers().take_over([], committed=9)
    assert second.run.later.flush(10.0)
    first.dies()
    check(second.run, 10)


def test_a_kept_line_of_a_rolled_back_step_is_not_written(nodes):
    first, second, _ = nodes
    first.coordinate(nodes[1:]).answers().commit(*range(3))
    first.freezes().commit(*range(3, 10))
    first.dies()
    second.answers().take_over([], committed=7)
    assert second.run.later.flush(10.0)
    assert [line["step"] for line in lines(second.run.metrics)] == [*range(8)]
    assert [line["step"] for line in lines(second.run.samples)] == [*range(8)]


def test_rolled_back_and_repeated_steps_have_their_newest_line(nodes):
    first, second, _ = nodes
    first.coordinate(nodes[1:]).answers().commit(*range(6))
    first.freezes().commit(6, 7)
    first.job.first_step = 4
    first.note(event="restarted", committed=7)
    first.term = 7  # the term of the lines that the old coordinator makes from now on
    first.commit(4, 5, 6)
    first.dies()
    second.answers().take_over([], committed=6)
    assert second.run.later.flush(10.0)
    check(second.run, 7, spawned=[*range(8), 4, 5, 6])
    assert [line["term"] for line in lines(second.run.metrics)] == [0] * 4 + [1] * 3


def test_a_death_among_the_kept_lines_is_counted_and_not_recorded_again(nodes):
    first, second, _ = nodes
    first.coordinate(nodes[1:]).answers().commit(0)
    first.freezes().commit(1)
    dead, live = first.job.workers.values()
    first.recorder.death(dead, (0, 0), now=1.0)
    first.recorder.explain_death((0, 0), Death("signal", "SIGKILL"))
    first.dies()
    second.take_over([], committed=1)
    second.recorder.found_dead(dead, (0, 0), now=5.0)
    second.recorder.found_dead(live, (1, 0), now=5.0)
    second.recorder.suppose_death((1, 0), Death("unknown", ""))
    second.recorder.finished({})
    assert second.answers().run.later.flush(10.0)
    deaths = [event["worker"] for event in second.run.lines(second.run.events) if event["event"] == "death_detected"]
    assert deaths == [str(dead), str(live)]
    assert json.loads(second.run.summary.read_text())["deaths"] == 2


def test_no_message_is_sent_while_the_disk_answers_and_one_after_a_freeze(nodes, monkeypatch):
    monkeypatch.setattr(unwritten, "LATE_SECONDS", 10.0)
    first, sent = nodes[0], []
    first.coordinate([]).answers().commit(0)
    first.recorder.share(sent.append)
    first.commit(1, 2)
    first.freezes().commit(3)
    assert not sent, "no line is late"
    monkeypatch.setattr(unwritten, "LATE_SECONDS", 0.0)
    first.recorder.retry()
    assert [line.step for line in sent.pop().lines if line.file == "metrics.jsonl"] == [3]
    first.answers().freezes()
    first.recorder.retry()
    (forget,) = sent
    assert forget.whole and not forget.lines
    first.recorder.retry()
    assert len(sent) == 1


def test_a_newly_connected_supervisor_gets_each_copy_once(nodes):
    first, second, third = nodes
    first.coordinate([second]).answers().commit(0)
    first.freezes().commit(1, 2)
    third.run.kept.receive(next(iter(_messages(10))))
    first.recorder.share_with(third.receive)
    first.recorder.share(lambda message: [node.receive(message) for node in (second, third)])
    first.commit(3)
    for file in ("metrics.jsonl", "samples.jsonl", "events.jsonl"):
        assert third.run.kept.lines(file) == second.run.kept.lines(file)
        assert len(third.run.kept.lines(file)) == 3


def test_copies_are_sent_in_frames_of_limited_size():
    messages = _messages(10 * CHUNK // 1000)
    kept = Unwritten()
    for message in messages:
        kept.receive(message)
        assert len(encode_body(message)) < 2 * CHUNK
    assert [line.step for line in kept.lines("metrics.jsonl")] == [*range(10 * CHUNK // 1000)]


def test_the_oldest_copies_beyond_the_limit_are_dropped_and_counted(nodes, monkeypatch, capsys):
    monkeypatch.setattr(unwritten, "MOST_BYTES", 3000)
    first, second, _ = nodes
    first.coordinate(nodes[1:]).answers().commit(*range(3))
    first.freezes().commit(*range(3, 60))
    first.dies()
    assert 0 < sum(len(line.record) for line in second.run.kept.lines("metrics.jsonl")) <= 3000
    second.answers().take_over([], committed=59)
    assert second.run.later.flush(10.0)
    steps = [line["step"] for line in second.run.lines(second.run.metrics)]
    missing = {*range(60)} - {*steps}
    assert steps == sorted({*steps}) and steps[-1] == 59 and missing == {*range(3, 3 + len(missing))}
    assert warn.flush(10) and f"metrics.jsonl lacks {len(missing)} lines" in capsys.readouterr().err


def _messages(count):
    """The messages with copies of `count` lines of 1 kB."""
    sent, late = [], Unwritten()
    late.share(sent.append)
    for step in range(count):
        late.add("metrics.jsonl", step, b"x" * 1000, since=0.0)
    late.look()
    return sent
