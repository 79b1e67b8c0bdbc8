"""The hang detector finds hangs in the reports of supervisors and workers, and writes a file about each hang.

All waits are in virtual time, so that a busy machine changes nothing."""

import asyncio
import json
from types import SimpleNamespace

import msgspec
import pytest
from recycle_schedules import Worker

from recycle_pp.config.settings import Control, Settings
from recycle_pp.coordinator import hang_detector, hang_reports
from recycle_pp.coordinator.hang_detector import RENEWALS, HangDetector
from recycle_pp.protocol.assignment import initial
from recycle_pp.protocol.events import LinksBroken
from recycle_pp.telemetry.background import now
from recycle_pp.telemetry.events.job import WaitsForData
from recycle_pp.telemetry.events.recovery import Renewed
from recycle_pp.wire.messages.activity import Activity
from recycle_pp.wire.messages.lifecycle import Reading, WorkerHeartbeat
from recycle_pp.wire.messages.supervisors import CoordinatorHeartbeat, Signs, Stacks, SupervisorHeartbeat
from recycle_pp.wire.records import HangReport
from tests.recycle_pp.failover.clock import VirtualLoop

from .states import job_state

BEAT, SUSPICION = 0.01, 0.15
F = Activity("works", "F", 7, (1, 3))


@pytest.fixture
def loop(monkeypatch):
    loop = VirtualLoop()
    loop.run(until=100.0)  # as on a machine that has been up for a while
    for module in (hang_detector, hang_reports):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=loop.time, time=loop.time))
    yield loop
    loop.close()
    assert not loop.errors


@pytest.fixture
def new_job(loop, tmp_path):
    """Makes a job. Its keywords are those of `Job`."""
    return lambda **keywords: Job(loop, tmp_path, **keywords)


class Supervisor:
    """A connection that records the types of the messages sent."""

    hello = None

    def __init__(self):
        self.received, self.aborted = [], False

    def send(self, message):
        self.received.append(type(message))

    def abort(self):
        self.aborted = True


class Job:
    """Twelve workers in step 7.

    The same object stands for the detector's driver, its handler of deaths, and the protocol's job.

    say: worker number -> activity; all other workers compute
    """

    agreement_gate = SimpleNamespace(busy=False)
    committed, phase, unanswered, waits_for_round = 6, "running", frozenset(), False
    first_step, assignment = 0, initial(3, 4)

    def __init__(self, loop, folder, alive=12, suspicion=SUSPICION):
        self.loop = loop
        self.state = job_state(Settings(control=Control(heartbeat=BEAT, suspicion=suspicion)), self, folder)
        self.state.run.later = now
        self.roster, self.folder = self.state.roster, folder / "hangs"
        self.hangs = HangDetector(self.state, self, SimpleNamespace(busy=False), self)
        self.found, self.generation, self.say, self.since, self.silent, self.deaf = (
            {}, 3, {}, loop.time(), set(), set()
        )  # fmt: skip
        self.others_do = F
        self.received = {}  # bytes from its peers, by worker; each heartbeat adds some
        self.reading = {}  # start of the current read, by worker; None: no read
        self.quiet = {}  # seconds since the last sign of progress, by worker; default: since the activity began
        self.last = {}  # age of the last activity, for workers without new vital signs whose supervisors are alive
        for number in range(12):
            rank = self.roster.enter(number)
            rank.incarnation, rank.place, rank.supervisor = 0, ("127.0.0.1", number), Supervisor()
            rank.alive, rank.last_message = number < alive, loop.time()
        self.live = {rank.number for rank in self.roster if rank.alive}

    def problem_now(self):
        return SimpleNamespace(graph=SimpleNamespace(between=lambda a, b: 0.0))

    def end_stuck(self, rank, stuck):
        rank.alive = False
        self.live.discard(rank.number)
        self.generation += 1
        self.say.clear()  # the others get a new plan
        self.found[rank.number] = stuck

    def drive(self, event):
        assert event == LinksBroken()
        self.generation += 1
        self.renewed()

    def renewed(self):
        """Restarts all waits, as in a new generation."""
        self.since = self.loop.time()

    def recorded(self, kind):
        return [event for event in self.state.recorder.whole if isinstance(event, kind)]

    @property
    def renewals(self):
        return [event.waiting for event in self.recorded(Renewed)]

    @property
    def awaited(self):
        return [(event.waiting, event.path, event.seconds) for event in self.recorded(WaitsForData)]

    @property
    def stopped(self):
        return self.state.lifecycle.reason

    def beat(self):
        now = self.loop.time()
        for rank in self.roster:
            if rank.number not in self.silent:
                rank.last_message = now
            if rank.number not in self.deaf:
                rank.missed_heartbeats = 0
            activity = self.say.get(rank.number)
            age = now - self.since if activity else 0.0
            if rank.number in self.last:
                if now > self.since + BEAT / 2:
                    continue
                age = self.last[rank.number]
            signs = Signs(0, 1, activity or self.others_do, age, self.quiet.get(rank.number, age))
            self.hangs.supervisor_beats(rank, SupervisorHeartbeat(signs))
            if rank.number in self.received:
                self.received[rank.number] += 100
                self.hangs.worker_beats(rank, WorkerHeartbeat(now, "boot", received=self.received[rank.number]))
            if rank.number in self.reading:
                began = self.reading[rank.number]
                reading = Reading("train.bin", now - began if began else 0.0)
                self.hangs.worker_beats(rank, WorkerHeartbeat(now, "boot", reading=reading))

    def watch(self, seconds):
        """Runs the detector for this time, or until the job stops."""
        self.run(self.watched(seconds))

    def run(self, coroutine):
        task = self.loop.create_task(coroutine)
        self.loop.run(until=self.loop.time() + 60.0)
        task.result()

    async def watched(self, seconds):
        watching = asyncio.create_task(self.hangs.run())
        end = self.loop.time() + seconds
        while self.loop.time() < end and not self.stopped:
            await asyncio.sleep(0.002)
            self.beat()
        watching.cancel()

    def reports(self):
        return json.loads((self.folder / "step-000007.json").read_text())


def test_a_worker_that_hangs_in_an_op_is_found_once_and_the_file_lists_all_activities(new_job):
    job = new_job()
    job.say[6] = F
    job.say[2] = Activity("waits", "tensor", 7, (1, 3), Worker(1, 2))
    job.watch(0.5)
    assert list(job.found) == [6] and job.found[6].where == "F of micro-batch 1.3 in step 7"
    assert SUSPICION < job.found[6].seconds < 3 * SUSPICION
    (report,) = job.reports()
    assert report["waits"] == [["0.2", "1.2"]] and report["workers"]["1.2"]["does"] == job.found[6].where
    job.hangs.stacks(job.roster[6], Stacks(0, "Thread 0x1"))
    assert (job.folder / report["stuck"]["1.2"]["stacks"]).read_text() == "Thread 0x1"


def test_a_late_step_leaves_a_report_of_all_activities_before_any_worker_is_stuck(new_job):
    job = new_job()
    job.say |= {2: Activity("waits", "sum", 7), 6: F}
    job.quiet[6] = 0.0  # its op takes long, but makes progress
    job.beat()
    job.hangs.worker_beats(job.roster[2], WorkerHeartbeat(job.loop.time(), "boot", lacks=[6]))
    job.watch(SUSPICION * 0.7)
    report = msgspec.json.decode((job.folder / "now.json").read_bytes(), type=HangReport)
    assert not job.found and report.step == 7 and not report.stuck and not report.missing
    assert report.workers["0.2"].lacks == ["1.2"] and report.workers["1.2"].does == str(F)
    assert ("0.2", "1.2") in report.waits
    assert report.workers["1.2"].quiet == 0.0 < report.workers["1.2"].seconds


def test_a_silent_worker_is_found_once_and_one_with_heartbeats_is_not(new_job):
    job = new_job(alive=2)
    job.silent.add(1)
    job.say = {0: Activity("waits", "commit", 7), 1: Activity("waits", "commit", 7)}
    job.roster[1].last_message = job.loop.time()
    job.watch(0.3)
    assert list(job.found) == [1] and "without a heartbeat" in job.found[1].where


def test_a_worker_that_ignores_a_delivered_message_is_found(new_job):
    job = new_job()
    job.say[6] = Activity("waits", "tensor", 7, (1, 3), Worker(1, 1))
    job.beat()
    job.hangs.worker_beats(job.roster[6], WorkerHeartbeat(0.0, "boot", delivered=1))
    job.watch(0.5)
    assert list(job.found) == [6] and job.found[6].where.endswith("from 1.1, although it has arrived")


def test_signs_of_an_earlier_incarnation_do_not_count(new_job):
    job = new_job()
    job.say[6] = F
    job.roster[6].incarnation = 1  # a new incarnation; signs of the old one are still arriving
    job.watch(0.4)
    assert not job.found


def test_if_all_workers_wait_the_generation_is_renewed_and_finally_the_job_stops(new_job):
    job = new_job(suspicion=0.2)
    job.say = dict.fromkeys(range(12), Activity("waits", "sum", 7))
    job.watch(10.0)
    assert len(job.renewals) == RENEWALS and len(job.renewals[0]) == 12
    assert "all workers wait in step 7" in job.stopped and str(job.folder) in job.stopped
    assert not job.found


@pytest.mark.parametrize("what", ["sum", "copy"])
def test_a_wait_for_workers_that_still_receive_bytes_is_not_a_deadlock(what, new_job):
    """All wait for stage 2, one of whose workers receives a long message through a slow network."""
    job = new_job()
    job.say = dict.fromkeys(range(12), Activity("waits", "commit", 7))
    job.say |= dict.fromkeys((2, 6, 10), Activity("waits", what, 7))

    async def transfer():
        job.received = {2: 0}
        await job.watched(4 * SUSPICION)
        assert not job.renewals
        job.received = {}  # nothing arrives any more
        await job.watched(2 * SUSPICION)

    job.run(transfer())
    assert len(job.renewals) == 1 and not job.found and not job.stopped


def test_a_sum_whose_bytes_are_unknown_may_take_ten_times_its_profiled_time(new_job, monkeypatch):
    job = new_job()
    monkeypatch.setattr(job.state.profile, "sum_seconds", lambda worker: 0.3 * SUSPICION)
    job.say = dict.fromkeys(range(12), Activity("waits", "sum", 7))
    job.watch(2.5 * SUSPICION)
    assert not job.renewals
    job.watch(SUSPICION)
    assert len(job.renewals) == 1


@pytest.mark.parametrize("stale", [True, False])
def test_signs_of_different_moments_are_not_taken_for_a_deadlock(stale, new_job):
    """One worker's last vital sign shows a long wait for the commit, but the others are already in the next step."""
    job = new_job(suspicion=0.05)
    job.say[0], job.others_do = Activity("waits", "commit", 7), Activity("works", "F", 8, (1, 3))
    if stale:
        job.last = {0: 10.0}
    job.watch(0.3)
    assert not job.found
    assert bool(job.renewals) != stale


def test_a_worker_stopped_during_a_wait_is_found_without_renewing_the_generation(new_job):
    """The other workers' waits reach the suspicion before this worker's silence does, so they look like a deadlock."""
    job = new_job()
    job.say = dict.fromkeys(range(12), Activity("waits", "commit", 7))

    async def stopped():
        await job.watched(SUSPICION / 3)
        job.silent.add(6)
        await job.watched(2 * SUSPICION)

    job.run(stopped())
    assert list(job.found) == [6] and "without a heartbeat" in job.found[6].where
    assert not job.renewals


def test_a_worker_that_still_waits_in_a_void_generation_is_found_after_the_next_announcement(new_job):
    """Its wait should have ended with the old generation, so no report of an arrived message is needed."""
    job = new_job()
    job.say = dict.fromkeys(range(12), Activity("waits", "sum", 7))
    job.renewed = lambda: [job.say.pop(number) for number in range(12) if number != 6]
    job.watch(0.8)
    assert len(job.renewals) == 1 and list(job.found) == [6]


def test_a_silent_supervisor_is_disconnected(new_job):
    job = new_job()
    job.deaf.add(4)
    job.watch(0.5)
    assert [rank.number for rank in job.roster if rank.supervisor.aborted] == [4]
    assert CoordinatorHeartbeat in job.roster[4].supervisor.received


@pytest.mark.parametrize("number", [0, 5])
def test_a_coordinator_that_was_suspended_reports_no_worker_as_silent(number, new_job):
    job = new_job(suspicion=0.2)
    job.silent.add(number)

    async def sleep_for_a_while():
        watch = asyncio.create_task(job.watched(0.05))
        await asyncio.sleep(0.02)
        job.loop.pause(None, 0.5)  # suspends the whole process
        await watch

    job.run(sleep_for_a_while())
    assert not job.found


DATA, TURN = Activity("works", "data", 7, (1, 3)), Activity("waits", "commit", 7)


def test_a_job_whose_disks_are_all_silent_waits_and_reports_it_repeatedly(new_job, monkeypatch):
    monkeypatch.setattr(hang_detector, "DATA_SECONDS", 0.2)
    job = new_job()
    job.say = dict.fromkeys(range(12), TURN) | {0: DATA, 4: DATA}
    job.reading = {0: job.since, 4: job.since, 8: job.since + 0.01}
    job.watch(0.7)
    assert not job.found and not job.renewals
    assert len(job.awaited) == 3
    assert all(seen[:2] == (["0.0", "1.0"], "train.bin") for seen in job.awaited)
    assert all(abs(seconds - 0.2 * (n + 1)) < 0.15 for n, (_, _, seconds) in enumerate(job.awaited))


def test_a_reader_is_not_killed_if_its_disk_answers_shortly_after_the_others(new_job):
    job = new_job(suspicion=0.4)
    job.say = dict.fromkeys(range(12), TURN) | {0: DATA, 4: DATA}
    job.reading = {0: job.since, 4: job.since, 8: job.since + 0.01}

    async def disks_answer():
        watched = asyncio.create_task(job.watched(1.5))
        await asyncio.sleep(1.0)
        job.say[4], job.reading[4], job.reading[8] = TURN, None, None
        await asyncio.sleep(0.1)
        job.say[0], job.reading[0] = TURN, None
        await watched

    job.run(disks_answer())
    assert not job.found


def test_a_reader_is_found_if_only_its_disk_is_silent(new_job):
    job = new_job()
    job.say = dict.fromkeys(range(12), TURN) | {0: DATA}
    job.reading = {0: job.since, 4: None, 8: None}
    job.watch(0.5)
    assert list(job.found) == [0] and not job.awaited
