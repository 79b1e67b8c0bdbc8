"""Requests of operators are carried out, or refused with a reason."""

import asyncio
from types import SimpleNamespace

import pytest

from recycle_pp.config.settings import Settings
from recycle_pp.coordinator.job import new_job
from recycle_pp.coordinator.operators import Operators
from recycle_pp.protocol.events import Outcome
from recycle_pp.protocol.events import SettingsChanged as Changed
from recycle_pp.wire.messages.ctl import (
    Begun,
    ChangeSettings,
    Done,
    Drain,
    NotDone,
    ReadStacks,
    RecordProfile,
    TakeCheckpoint,
)
from recycle_pp.wire.messages.lifecycle import Profiled
from recycle_pp.wire.messages.supervisors import Death, Evict, ShowStacks, Stacks

from .states import Driver, job_state


class Peer:
    """The operator's connection."""

    def __init__(self, request):
        self.request, self.received = request, []

    async def recv(self, vocabulary):
        return self.request

    def send(self, message):
        self.received.append(message)


class Worker:
    """The connection of a worker or of its supervisor."""

    hello = None

    def __init__(self):
        self.received = []

    def send(self, message):
        self.received.append(message)


@pytest.fixture
def of():
    """Two pipelines of two stages; worker 1.1 is dead."""
    settings = Settings().with_values({"parallel.pipelines": 2, "parallel.stages": 2})
    job = new_job(settings, 0)
    job.phase, job._base, job.live = "running", 0, {0, 1, 2}
    state, ended, driver = job_state(settings, job), [], Driver()
    for number in range(4):
        rank = state.roster.enter(number)
        rank.supervisor, rank.worker, rank.incarnation = Worker(), Worker(), 0
        rank.alive = number < 3
    deaths = SimpleNamespace(end=lambda rank, *why: ended.append((rank.number, *why)))
    operators = Operators(state, driver, deaths)
    return SimpleNamespace(state=state, operators=operators, driver=driver, ended=ended, roster=state.roster)


def ask(of, request, *meanwhile):
    """Sends a request and, while it is served, calls the functions `meanwhile` in turn.

    Returns the progress lines and the final answer.
    """
    peer = Peer(request)

    async def serve():
        serving = asyncio.create_task(of.operators.serve(peer))
        for call in meanwhile:
            await asyncio.sleep(0.01)
            call()
        await asyncio.wait_for(serving, 10)

    asyncio.run(serve())
    *begun, answer = peer.received
    assert all(isinstance(message, Begun) for message in begun)
    return [message.text for message in begun], answer


EMULATED = Settings().with_values({"parallel.pipelines": 2, "parallel.stages": 2, "emulate.mode": "sleep"})
REFUSED = {
    "unknown": (Drain((2, 0)), "there is no worker 2.0: the workers of this job are 0.0 to 1.1"),
    "dead": (ReadStacks((1, 1)), "worker 1.1 has no process now: it has died, has left, or was not started yet"),
    "last": (
        Drain((0, 1)),
        "worker 0.1 is the last of stage 1; with --force it leaves after a checkpoint, from which all others restart",
    ),
    "fixed": (
        ChangeSettings({"run.steps": 5}),
        "run.steps cannot change while the job runs; these keys can: schedule.rebalance, optimizer.most_skipped, "
        "checkpoint.every, checkpoint.minutes, run.respawns",
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_refused_request_changes_nothing_and_is_explained_in_one_sentence(why, of):
    request, sentence = REFUSED[why]
    assert ask(of, request) == ([], NotDone(sentence))
    assert not of.driver.driven and not of.ended
    assert not any(rank.supervisor.received or rank.worker.received for rank in of.roster)


def test_a_joiner_cannot_be_profiled(of):
    of.roster[3].alive = True
    assert ask(of, RecordProfile((1, 1), 3)) == ([], NotDone("worker 1.1 does not take part in steps yet"))


def test_a_forced_drain_is_refused_if_too_few_workers_would_be_left(of):
    of.state.job.live = {0, 1}
    _, answer = ask(of, Drain((0, 1), force=True))
    assert answer.reason == (
        "without worker 0.1 only 1 worker would be left for 2 stages; `ctl stop` ends the job with a checkpoint"
    )


def test_a_job_with_emulated_compute_refuses_to_save_checkpoints(of):
    of.state.settings = EMULATED
    assert ask(of, TakeCheckpoint()) == ([], NotDone("emulate=sleep saves no checkpoints"))
    assert ask(of, Drain((0, 1), force=True))[1] == NotDone("emulate=sleep saves no checkpoints")
    assert not of.ended


def test_a_drained_worker_gets_sigterm_and_the_request_is_answered_after_its_end(of):
    rank = of.roster[2]

    def leaves():
        rank.causes[0] = SimpleNamespace(cause="eviction", detail="SIGTERM")
        rank.alive, rank.died, rank.explained = False, 0, 0

    begun, answer = ask(of, Drain((1, 0)), leaves)
    assert begun == ["worker 1.0 finishes its step, hands over its work and leaves"]
    assert rank.supervisor.received == [Evict()] and not of.ended
    assert answer == Done("worker 1.0 has left; the job continues without it")


@pytest.mark.parametrize(("cause", "done"), [("eviction", True), ("signal", False)])
def test_a_drain_that_a_lost_coordinator_has_carried_out_is_not_refused_by_the_next_one(cause, done, of):
    of.roster[3].causes[0] = Death(cause, "SIGTERM")
    begun, answer = ask(of, Drain((1, 1)))
    assert begun == [] and isinstance(answer, Done) == done


def test_of_two_workers_of_a_stage_only_one_can_be_drained(of):
    of.state.job.leaving = {0}
    assert "is the last of stage 0" in ask(of, Drain((1, 0)))[1].reason


def test_the_last_worker_of_a_stage_is_ended_only_after_a_checkpoint(of):
    rank, saving, ending = of.roster[1], of.state.saving, of.state.ending

    def commits():
        assert ending.save_asked and not of.ended
        ending.committed(saves=True, skipped=False)
        saving.begin(21, [0, 1], final=False, live=[0, 1])

    def saved():
        assert not of.ended
        saving.abandon()
        saving._newest = 21
        rank.causes[0] = SimpleNamespace(cause="eviction", detail="ctl")
        rank.explained = 0

    begun, answer = ask(of, Drain((0, 1), force=True), commits, saved)
    assert begun == ["the next commit saves a checkpoint"]
    assert of.ended == [(1, "eviction", "ctl drain --force")]
    assert isinstance(answer, Done)


def test_a_checkpoint_that_fails_is_not_reported_as_complete(of):
    saving, ending = of.state.saving, of.state.ending

    def fails():
        ending.committed(saves=True, skipped=False)
        saving.begin(21, [0, 1], final=False, live=[0, 1])
        saving.abandon()

    _, answer = ask(of, TakeCheckpoint(), fails)
    assert answer == NotDone("checkpoint step-000021 was not saved; the reason is in its event")


def test_a_checkpoint_that_does_not_reach_the_store_is_not_reported_as_complete(of):
    saving, ending = of.state.saving, of.state.ending
    of.state.settings = of.state.settings.with_values({"checkpoint.store": "s3://bucket/runs"})

    def saved_but_not_stored():
        ending.committed(saves=True, skipped=False)
        saving.begin(21, [0, 1], final=False, live=[0, 1])
        saving.abandon()
        saving._newest = 21

    _, answer = ask(of, TakeCheckpoint(), saved_but_not_stored)
    assert answer == NotDone("checkpoint step-000021 did not reach the store; the reason is in its event")


def test_a_request_waits_for_an_unfinished_checkpoint(of):
    """Otherwise each commit would report a skipped checkpoint."""
    saving, seen = of.state.saving, []
    saving.begin(20, [0, 1], final=False, live=[0, 1])
    saving.writing = {0}

    def done():
        seen.append(of.state.ending.save_asked)
        saving.writing.clear()
        saving.abandon()
        of.state.lifecycle.end(0)

    assert ask(of, TakeCheckpoint(), done)[1] == NotDone("the job ended first") and seen == [False]


def test_stacks_come_from_the_supervisor(of):
    rank = of.roster[1]
    answer = Stacks(0, "Thread 0x1 (most recent call first):\n", shown=True)
    _, done = ask(of, ReadStacks((0, 1)), lambda: of.operators.stacks(rank, answer))
    assert rank.supervisor.received == [ShowStacks(0)] and done == Done("Thread 0x1 (most recent call first):")
    nothing = Stacks(0, "", shown=True)
    _, done = ask(of, ReadStacks((0, 1)), lambda: of.operators.stacks(rank, nothing))
    assert isinstance(done, NotDone), "an older answer must not be repeated"


def test_a_profile_request_ends_when_the_worker_has_written_it_or_has_died(of):
    rank = of.roster[1]
    written = Profiled("runs/mine/profiles/x.json.gz", 3)
    _, done = ask(of, RecordProfile((0, 1), 3), lambda: of.operators.profiled(rank, written))
    assert done == Done("3 steps of worker 0.1: runs/mine/profiles/x.json.gz")
    assert of.state.recorder.events == ["profiled"]
    _, done = ask(of, RecordProfile((0, 1), 3), lambda: setattr(rank, "alive", False))
    assert done == NotDone("worker 0.1 died before its profile was complete")


def committed(changes):
    return Outcome([], [{"event": "committed", "commit": SimpleNamespace(changes=changes)}])


def test_a_change_is_done_once_all_voters_have_a_commit_with_it(of):
    values = {"checkpoint.minutes": 2.5, "run.respawns": 9}

    def drives():
        assert of.driver.driven == [Changed(values)]
        note = {"event": "settings_changed", "values": values}
        of.operators.handled(of.driver.driven[0], Outcome([], [note]))
        of.operators.handled(None, committed(values))

    _, answer = ask(of, ChangeSettings(values), drives, lambda: of.operators.handled(None, committed(values)))
    assert answer == Done("checkpoint.minutes=2.5, run.respawns=9 from step 0 on")
    assert (of.state.settings.checkpoint.minutes, of.state.ending.minutes, of.state.restarts.respawns) == (2.5, 2.5, 9)
    assert of.state.recorder.whole[0].changes == ["checkpoint.minutes=2.5", "run.respawns=9"]


def test_a_change_that_another_request_replaces_before_it_is_known_does_not_wait_for_ever(of):
    first, second = Peer(ChangeSettings({"checkpoint.every": 50})), Peer(ChangeSettings({"checkpoint.every": 20}))

    async def serve():
        serving = [asyncio.create_task(of.operators.serve(peer)) for peer in (first, second)]
        await asyncio.sleep(0.01)
        for _ in range(2):
            of.operators.handled(None, committed({"checkpoint.every": 20}))
        await asyncio.wait_for(asyncio.gather(*serving), 10)

    asyncio.run(serve())
    assert first.received[-1] == NotDone("checkpoint.every was set to 20 by another request")
    assert second.received[-1] == Done("checkpoint.every=20 from step 0 on")


def test_a_new_coordinator_applies_an_earlier_change_without_recording_it_again(of):
    note = {"event": "settings_changed", "values": {"run.respawns": 9}}
    of.operators.handled(None, Outcome([], [note]))
    assert of.state.restarts.respawns == 9 and of.state.settings.run.respawns == 9
    assert not of.state.recorder.events
