"""A new coordinator decides whether the job is lost, and misses nothing that happens while it takes over."""

import asyncio
import errno
import io
import json
import os
import threading
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from recycle_schedules import Worker

from recycle_pp.config.settings import Checkpoint, Control, Parallel, Run, Settings
from recycle_pp.coordinator.checkpoints import Saving, Whole
from recycle_pp.coordinator.coordinator import Coordinator
from recycle_pp.telemetry import background
from recycle_pp.telemetry.event_log import EventLog
from recycle_pp.telemetry.history import History
from recycle_pp.telemetry.progress import Progress
from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.wire.messages.agreement import Leader, Place, Takeover
from recycle_pp.wire.messages.handshake import SupervisorHello, WorkerHello
from recycle_pp.wire.messages.lifecycle import Ready
from recycle_pp.wire.messages.steps import Commit
from recycle_pp.wire.messages.supervisors import (
    CoordinatorHeartbeat,
    Death,
    Died,
    EndsSoon,
    Evict,
    Kill,
    Registration,
    Spawn,
    Stopping,
)
from recycle_pp.wire.messages.workers import State


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


def take_over(folder, generation, code=1, resume=False):
    """Runs a new coordinator. Returns the reason why the job stops, and the names of its events."""
    settings = Settings(
        run=Run(steps=9, dir=str(folder), resume=resume),
        parallel=Parallel(1, 1, microbatches=1),
        control=Control(suspicion=0.1),
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


def test_a_resumed_job_whose_checkpoints_cannot_be_read_does_not_begin_at_step_0(tmp_path):
    reason, _ = take_over(tmp_path, generation=-1, resume=True)
    assert reason == "run.resume=true: no checkpoint could be read"


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


class Client:
    """A supervisor or a worker that is connected to the coordinator."""

    was_reset = False

    def __init__(self, hello, *messages):
        self.hello, self.messages, self.sent = hello, asyncio.Queue(), []
        for message in messages:
            self.messages.put_nowait(message)

    async def recv(self, vocabulary):
        return await self.messages.get()

    async def listen(self, vocabulary):
        while (message := await self.messages.get()) is not None:
            yield message

    def send(self, message):
        self.sent.append(message)

    send_frame = send

    def set_keepalive(self, seconds):
        pass

    def abort(self):
        self.messages.put_nowait(None)


@asynccontextmanager
async def three_workers(folder, state, last=None, store=None, deaths=(), agreed=None, moved=True, **control):
    """A new coordinator of three workers of one stage, which have all reported `state`.

    Yields the coordinator, the clients of the workers' supervisors, and the task that runs the coordinator.

    last: report of the last worker, if it differs from `state`
    deaths: deaths of the last worker's processes. If given, it is dead and does not report
    agreed: the newest agreed generation, if it differs from the one in `state`
    moved: whether an earlier coordinator had welcomed the workers; otherwise they do not report
    """
    settings = Settings(
        run=Run(steps=9, dir=str(folder)),
        parallel=Parallel(3, 1, microbatches=1),
        control=Control(suspicion=0.2, **control),
        checkpoint=Checkpoint(store=store),
    )
    run = RunFolder(folder)
    progress = Progress(steps=9, workers=3, stream=io.StringIO())
    events, leader, takeover = EventLog(run.events, steps=9), Leader(1, 0, "127.0.0.1", 1), Takeover(0, 0, 3.0, 4.0)
    coordinator = Coordinator(
        settings,
        run,
        events,
        progress,
        Agreed(state.generation if agreed is None else agreed),
        leader,
        takeover=takeover,
        token="",
    )
    supervisors, tasks = [], []
    for rank in range(3):
        died = list(deaths) if rank == 2 else []
        place, spawn = Place("127.0.0.1", 1 + rank), Spawn(max(0, len(died) - 1), (rank, 0), 0)
        registration = Registration(place, spawn, not died, died)
        supervisors.append(Client(SupervisorHello(rank, f"node{rank}", 7), registration))
        worker = Client(WorkerHello(rank, 0, moved=moved), (rank == 2 and last) or state)
        for client in (supervisors[-1], worker)[: 1 if died else 2]:
            tasks.append(asyncio.create_task(coordinator.handle(client)))
    tasks.append(asyncio.create_task(coordinator.run()))
    try:
        yield coordinator, supervisors, tasks[-1]
    finally:
        for task in tasks:
            task.cancel()
        coordinator.stand_down()


def state_after(step, **fields):
    members = {rank: Worker(rank, 0) for rank in range(3)}
    return State(generation=2, members=members, base=0, committed=step, agreed=(0, 2), **fields)


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("ends", ["worker", "node"])
def test_a_death_while_the_coordinator_reads_the_run_folder_is_not_missed(ends, tmp_path, monkeypatch):
    """The death follows all workers' reports. If it were missed, the job would wait for the dead member."""

    async def main():
        read = asyncio.Event()
        monkeypatch.setattr(Saving, "look", lambda self: read.wait())
        async with three_workers(tmp_path, state_after(5)) as (coordinator, supervisors, _):
            await asyncio.sleep(0.5)
            died = Died(0, Death("signal", "SIGKILL", 0.0), asked=False)
            supervisors[1].messages.put_nowait(died if ends == "worker" else None)
            await asyncio.sleep(0.1)
            read.set()
            await until(lambda: coordinator.state.job.committed == 5)
            await until(lambda: coordinator.state.job.live == {0, 2})

    asyncio.run(main())


@pytest.mark.parametrize("error", [errno.ESTALE, None], ids=["stale", "silent"])
def test_a_run_folder_that_fails_does_not_delay_a_takeover_at_a_checkpoint(error, tmp_path, monkeypatch):
    """For instance, the folder was on the lost coordinator's node."""

    def failing(method):
        def call(path):
            if tmp_path / "checkpoints" not in (path, *path.parents):
                return method(path)
            if error is None:
                answers.wait(60.0)
            raise OSError(error, "the file system has failed")

        return call

    async def main():
        commit = Commit(2, 5, 1.0, 1.0, 1.0, savers=[0])
        async with three_workers(tmp_path, state_after(5, commit=commit)) as (coordinator, _, run):
            await until(lambda: coordinator.state.job.generation > 2 or run.done())
            assert not run.done() and coordinator.state.saving.busy

    answers = threading.Event()
    for name in ("exists", "is_dir", "iterdir"):
        monkeypatch.setattr(Path, name, failing(getattr(Path, name)))
    try:
        asyncio.run(main())
    finally:
        answers.set()


def test_a_new_process_of_a_worker_that_died_before_the_takeover_is_started_again_without_counting_as_dead(tmp_path):
    async def main():
        async with three_workers(tmp_path, state_after(5), last=State()) as (coordinator, supervisors, _):
            await until(lambda: coordinator.state.job.live == {0, 1})
            await until(lambda: any(isinstance(message, Spawn) for message in supervisors[2].sent))
            assert not any(isinstance(message, Kill) for message in supervisors[2].sent)
            assert coordinator.state.roster[2].died < 0

    asyncio.run(main())


def test_a_message_of_a_process_that_is_started_again_does_not_count_for_the_new_process(tmp_path):
    """Otherwise the new process would get its state before it is ready."""

    async def main():
        said = [Ready(("127.0.0.1", 1), "cpu")]
        async with three_workers(tmp_path, state_after(5), last=State(said=said)) as (coordinator, supervisors, _):
            await until(lambda: any(isinstance(message, Spawn) for message in supervisors[2].sent))
            await until(lambda: coordinator.state.job.generation > 2)
            assert 2 not in coordinator.state.job.followers

    asyncio.run(main())


@pytest.mark.parametrize("late", [False, True])
def test_a_worker_that_reconnects_during_a_takeover_keeps_its_newest_connection(late, tmp_path, monkeypatch):
    """late: whether its report on the new connection arrives after the takeover"""

    async def main():
        read = asyncio.Event()
        monkeypatch.setattr(Saving, "look", lambda self: read.wait())
        async with three_workers(tmp_path, state_after(5)) as (coordinator, supervisors, _):
            await asyncio.sleep(0.5)
            newest = Client(WorkerHello(2, 0, moved=True), *[state_after(5)] * (not late))
            handled = asyncio.create_task(coordinator.handle(newest))
            await asyncio.sleep(0.1)
            read.set()
            await until(lambda: coordinator.state.job.generation > 2)
            await asyncio.sleep(0.1)
            if late:
                newest.messages.put_nowait(state_after(5))
                await until(handled.done)  # its connection is closed, so it reconnects and reports again
                newest = Client(WorkerHello(2, 0, moved=True), state_after(5))
                handled = asyncio.create_task(coordinator.handle(newest))
                generation = coordinator.state.job.generation
                await until(lambda: coordinator.state.job.generation > generation)
            assert coordinator.state.job.live == {0, 1, 2} and coordinator.state.roster[2].worker is newest
            assert not any(isinstance(message, Kill) for message in supervisors[2].sent)
            handled.cancel()

    asyncio.run(main())


@pytest.mark.parametrize("failures", [1, 2])
def test_a_takeover_counts_an_exception_of_the_users_code_once(failures, tmp_path):
    """Only a second one in the same op stops the job."""

    async def main():
        where = "F of micro-batch 1.0 in step 3"
        death = Death("exception", "Traceback", 0.0, where=where, mistake="ValueError: bad")
        deaths = [Died(number, death, asked=False) for number in range(failures)]
        async with three_workers(tmp_path, state_after(5), deaths=deaths) as (coordinator, supervisors, run):
            if failures == 2:
                assert await asyncio.wait_for(run, 40) == 2
            else:
                await until(lambda: any(isinstance(message, Spawn) for message in supervisors[2].sent))
                assert coordinator.state.job.live == {0, 1} and not coordinator.state.lifecycle.over

    asyncio.run(main())


@pytest.mark.parametrize("moved", [False, True])
def test_a_takeover_during_a_restart_of_all_workers_restarts_them_again(moved, tmp_path, monkeypatch):
    """moved: whether the lost coordinator had welcomed the new processes, as joiners that load no checkpoint"""

    async def main():
        monkeypatch.setattr("recycle_pp.coordinator.checkpoints.newest_whole", lambda *_: Whole(3))
        async with three_workers(tmp_path, State(), agreed=2, moved=moved) as (coordinator, supervisors, run):
            await until(lambda: all(any(isinstance(m, Spawn) for m in s.sent) for s in supervisors) or run.done())
            job = coordinator.state.job
            assert (job.first_step, job.generation, job.waiting) == (3, 2, {0, 1, 2})
            assert not run.done()

    asyncio.run(main())


def test_with_etcd_a_takeover_without_any_member_ends_the_job(tmp_path):
    """Another part of the job may still run the agreed generation."""

    async def main():
        async with three_workers(tmp_path, State(), agreed=2, moved=False, coordinator="etcd") as (coordinator, _, run):
            assert await asyncio.wait_for(run, 40) == 1
            assert "were lost at once" in coordinator.state.lifecycle.reason

    asyncio.run(main())


@pytest.mark.parametrize(("signal", "answer"), [("SIGTERM", Evict), ("SIGINT", EndsSoon)])
def test_a_signal_that_is_reported_during_a_takeover_is_answered_after_it(signal, answer, tmp_path):
    async def main():
        async with three_workers(tmp_path, state_after(5)) as (coordinator, supervisors, _):
            supervisors[1].messages.put_nowait(Stopping(signal))
            await until(lambda: any(isinstance(message, answer) for message in supervisors[1].sent))
            assert coordinator.state.roster[1].stopping and coordinator.state.job.live == {0, 1, 2}
            assert any(isinstance(message, answer) for message in supervisors[0].sent) == (answer is EndsSoon)

    asyncio.run(main())


def test_supervisors_get_heartbeats_while_a_takeover_reads_the_checkpoints(tmp_path, monkeypatch):
    """Reading may take minutes. A coordinator that is silent for so long would be replaced."""

    async def main():
        async def whole(self):
            reads.set()
            await read.wait()
            return Whole()

        def heartbeats():
            return sum(isinstance(message, CoordinatorHeartbeat) for message in supervisors[1].sent)

        reads, read = asyncio.Event(), asyncio.Event()
        monkeypatch.setattr(Saving, "whole", whole)
        async with three_workers(tmp_path, State(), moved=False) as (coordinator, supervisors, _):
            await asyncio.wait_for(reads.wait(), 20.0)
            before = heartbeats()
            await until(lambda: heartbeats() > before)
            read.set()
            await until(lambda: coordinator.state.roster.complete)

    asyncio.run(main())


def test_after_a_takeover_the_last_checkpoint_has_a_time_limit(tmp_path):
    async def main():
        commit = Commit(2, 8, 1.0, 1.0, 1.0, savers=[0, 1, 2], last=True)
        async with three_workers(tmp_path, state_after(8, commit=commit), lease=0.5) as (coordinator, _, _):
            await until(lambda: coordinator.state.saving.busy)
            await until(lambda: coordinator.state.saving.failed)

    asyncio.run(main())


@pytest.mark.parametrize("last", [False, True])
def test_after_a_takeover_a_checkpoint_is_uploaded_even_if_its_assembler_is_lost(last, tmp_path):
    """The assembler resends `Assembled`, but it has died with the node of the lost coordinator."""

    async def main():
        (tmp_path / "checkpoints" / "step-000006" / "stage-0-1-0123abcd").mkdir(parents=True)
        commit = Commit(2, 5, 1.0, 1.0, 1.0, savers=[1], last=last)
        store = f"file://{tmp_path}/store"
        async with three_workers(tmp_path, state_after(5, commit=commit), store=store) as (coordinator, _, _):
            await until(lambda: coordinator.state.storing.busy)
            assert coordinator.state.storing.step == 6 and coordinator.state.storing.final == last

    asyncio.run(main())


def test_an_exception_in_a_takeover_ends_the_coordinator(tmp_path, monkeypatch):
    """Otherwise the coordinator would keep leading, and no successor would be elected."""

    async def main():
        monkeypatch.setattr(Saving, "newest_step", property(lambda self: 1 / 0))
        async with three_workers(tmp_path, state_after(5)) as (coordinator, _, run):
            assert await asyncio.wait_for(run, 40) == 1
            assert "ZeroDivisionError" in coordinator.state.lifecycle.reason

    asyncio.run(main())
