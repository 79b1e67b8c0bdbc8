"""The contents of protocol.jsonl, and which events are left out while the disk is slow or full."""

import asyncio

import pytest
from recycle_schedules import Problem, actions, plan

from recycle_pp.protocol.events import LinksBroken, WorkerDied, WorkerReady
from recycle_pp.protocol.job import Job
from recycle_pp.telemetry import protocol_log
from recycle_pp.telemetry.protocol_log import ProtocolLog
from recycle_pp.telemetry.replay import Replay

MEMBERS = [0, 1]


class Logged:
    """A job whose events are logged."""

    def __init__(self, path, term=0):
        self.path, self.job = path, Job(Problem(pipelines=2, stages=1, microbatches=1), 3, plan, actions)
        self.log = ProtocolLog(path, lambda: term, lambda: True)
        self.log.began(self.job)

    def handle(self, *events):
        for event in events:
            self.log.handled(self.job, event, self.job.handle(event))
        asyncio.run(self.log.flushed(10.0))

    def decisions(self):
        return [(type(decision.event), decision.same) for decision in Replay(self.path)]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "protocol.jsonl"


def test_every_event_is_replayed_with_the_recorded_outcome(path):
    logged = Logged(path)
    logged.handle(*map(WorkerReady, MEMBERS), WorkerDied(MEMBERS[1]))
    assert logged.decisions() == [(WorkerReady, True), (WorkerReady, True), (WorkerDied, True)]


def test_a_lost_event_is_noticed_because_later_decisions_differ(path):
    logged = Logged(path)
    logged.handle(*map(WorkerReady, MEMBERS), WorkerDied(MEMBERS[1]))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], *lines[2:]]))
    assert (WorkerReady, False) in logged.decisions()


def test_after_a_damaged_line_the_events_up_to_the_next_snapshot_are_missing(path):
    logged = Logged(path)
    logged.handle(*map(WorkerReady, MEMBERS))
    logged.log.began(logged.job)
    logged.handle(WorkerDied(MEMBERS[1]))
    first, damaged, *rest = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([first, damaged[:20] + b"\n", *rest]))
    decisions = Replay(path)
    assert [(type(d.event), d.same) for d in decisions] == [(WorkerDied, True)] and decisions.left_out == 2


def test_lines_after_the_last_decision_are_left_out_too_but_not_an_unfinished_last_line(path):
    logged = Logged(path)
    logged.handle(*map(WorkerReady, MEMBERS), WorkerDied(MEMBERS[1]))
    first, ready, damaged, last = path.read_bytes().splitlines(keepends=True)
    for content, left_out in ((first + ready + damaged[:20] + b"\n" + last, 2), (first + ready + damaged[:20], 0)):
        path.write_bytes(content)
        decisions = Replay(path)
        assert [type(d.event) for d in decisions] == [WorkerReady] and decisions.left_out == left_out


def test_lines_of_a_replaced_coordinator_do_not_count(path):
    old, new = Logged(path, term=3), Logged(path, term=4)
    new.handle(WorkerReady(MEMBERS[0]))
    old.handle(WorkerReady(MEMBERS[1]))
    new.handle(WorkerReady(MEMBERS[1]))
    assert [d.event.member for d in Replay(path)] == MEMBERS


def test_a_file_at_its_limit_is_replaced_by_a_snapshot_and_the_next_events(path, monkeypatch):
    monkeypatch.setattr(protocol_log, "MOST_BYTES", 10_000)
    logged = Logged(path)
    logged.handle(*map(WorkerReady, MEMBERS))
    for _ in range(100):
        logged.handle(LinksBroken())
        assert path.stat().st_size < 15_000
    decisions = logged.decisions()
    assert 0 < len(decisions) < 100 and all(same for _, same in decisions)


def test_events_are_left_out_while_the_disk_fails_and_a_snapshot_follows_when_it_works_again(path, monkeypatch):
    monkeypatch.setattr(protocol_log, "AGAIN_SECONDS", 0.0)
    logged = Logged(path)
    path.mkdir()  # a folder cannot be opened for writing
    logged.handle(WorkerReady(MEMBERS[0]))
    path.rmdir()
    logged.handle(WorkerReady(MEMBERS[1]))  # writes a snapshot, which includes this event
    logged.handle(WorkerDied(MEMBERS[1]))
    assert logged.decisions() == [(WorkerDied, True)]


def test_no_event_waits_for_a_disk_that_does_not_answer(path):
    logged = Logged(path)
    logged.log._later.permitted = lambda: asyncio.run(asyncio.sleep(60))
    for _ in range(20_000):  # more than the queue holds
        logged.log.handled(logged.job, LinksBroken(), logged.job.handle(LinksBroken()))
