"""Which rank a supervisor gets, and when its node counts as lost."""

from types import SimpleNamespace

import pytest

from recycle_pp.config.settings import Parallel, Settings
from recycle_pp.coordinator.supervisors import Supervisors
from recycle_pp.wire.frames import LENGTH
from recycle_pp.wire.messages.agreement import Leader, Place
from recycle_pp.wire.messages.handshake import SupervisorHello
from recycle_pp.wire.messages.supervisors import (
    TO_SUPERVISOR,
    Death,
    Evict,
    KeepLines,
    Line,
    NoPlace,
    Registration,
    Spawn,
    Stopping,
    SupervisorWelcome,
)

from .states import Driver, job_state


class Peer:
    was_reset = False

    def __init__(self, rank, host, pid=7, launcher=0):
        self.hello, self.received = SupervisorHello(rank, host, pid, launcher=launcher), []

    def send(self, message):
        self.received.append(message)

    def send_frame(self, frame):
        self.received.append(TO_SUPERVISOR.decode(frame[LENGTH.size :]))


@pytest.fixture
def of():
    """Two nodes with one worker each."""
    return made(Parallel(pipelines=2, stages=1))


def made(parallel):
    settings = Settings(parallel=parallel)
    state, returns = job_state(settings), SimpleNamespace(probed=None, cut={})
    timers = []
    state.timers = SimpleNamespace(after=lambda seconds, call, *arguments: timers.append((call, arguments)))
    state.recorder.share_with = lambda send: send(COPIES)
    for number in range(parallel.pipelines * parallel.stages):
        rank = state.roster.enter(number)
        rank.supervisor, rank.incarnation, rank.alive = Peer(number, f"node{number}"), 0, True
    lost, ended = [], []
    deaths = SimpleNamespace(
        dying=None,
        reported=None,
        node_lost=lambda rank: lost.append(rank.number),
        end=lambda rank, cause, detail: ended.append((rank.number, cause)),
    )
    hangs = operators = SimpleNamespace(supervisor_beats=None, stacks=None)
    driver = Driver()
    supervisors = Supervisors(state, Leader(0, 0, "10.0.0.1", 4000), driver, deaths, hangs, returns, operators, "a1b2")
    return SimpleNamespace(
        driver=driver,
        supervisors=supervisors,
        roster=state.roster,
        returns=returns,
        lease=state.lease,
        restarts=state.restarts,
        lost=lost,
        ended=ended,
        recorder=state.recorder,
        ending=state.ending,
        saving=state.saving,
        committed=state.job.committed,
        later=lambda: timers[-1][0](*timers[-1][1]),
    )


COPIES = KeepLines([Line(1, "metrics.jsonl", 20, b"{}")], whole=True, first=1, dropped={})


def welcome(of, peer):
    """Welcomes a supervisor. Returns its rank, or None, and the answer to it."""
    number = of.supervisors.welcome(peer, peer.hello)
    (message,) = peer.received
    return number, message


def test_the_silence_of_a_lost_node_does_not_count_against_its_replacement(of):
    """Otherwise the coordinator would close the replacement's connection before its first message."""
    of.roster[1].supervisor, of.roster[1].missed_heartbeats = None, 1000
    number, message = welcome(of, newcomer := Peer(-1, "node2"))
    assert number == message.rank == 1 and of.roster[1].supervisor is newcomer
    assert of.roster[1].missed_heartbeats == 0


def test_the_address_and_the_failed_gpu_of_a_lost_node_do_not_count_for_its_replacement(of):
    gpu = Death("gpu", "CUDA error: unspecified launch failure")
    of.roster[1].place = Place("10.0.0.2", 4000)
    assert of.restarts.is_respawned(of.roster[1], gpu)
    of.roster[1].supervisor = None
    welcome(of, Peer(-1, "node2"))
    assert 1 not in of.roster.places(), "the lost node cannot acknowledge a membership"
    assert of.restarts.is_respawned(of.roster[1], gpu)


def test_a_supervisor_of_an_abandoned_larger_launch_is_rejected(of):
    number, message = welcome(of, Peer(5, "node5"))
    assert number is None and isinstance(message, NoPlace)
    assert message.reason == "rank 5 belongs to another launch: this job has 2 workers"


def test_the_replacement_of_a_drained_node_is_not_drained_with_the_next_node(of):
    of.roster.enter(2).supervisor = drained = Peer(2, "node2")
    of.supervisors.receive(1, Stopping("SIGTERM"), of.roster[1].supervisor)
    of.roster[1].supervisor = None
    welcome(of, newcomer := Peer(-1, "node3"))
    of.supervisors.receive(2, Stopping("SIGTERM"), drained)
    newcomer.received.clear()
    of.later()
    assert drained.received == [Evict()] and not newcomer.received


def test_the_job_ends_with_a_checkpoint_if_the_workers_that_would_stay_are_dead(of):
    """The supervisor of the dead worker is connected, but nothing could continue the job."""
    of.roster[0].alive = False
    of.supervisors.receive(1, Stopping("SIGTERM"), of.roster[1].supervisor)
    of.later()
    assert of.driver.early == ("SIGTERM", 143) and not of.roster[1].supervisor.received


@pytest.mark.parametrize(("drained", "saves"), [((1, 3), True), ((2, 3), False)])
def test_a_drain_that_empties_a_stage_saves_a_checkpoint(drained, saves):
    of = made(Parallel(pipelines=2, stages=2))
    for number in drained:
        of.supervisors.receive(number, Stopping("SIGTERM"), of.roster[number].supervisor)
    of.later()
    assert all(of.roster[number].supervisor.received == [Evict()] for number in drained)
    assert of.ending.save_asked == saves
    if saves:
        of.later()
        assert not of.ended, "the checkpoint is not saved yet"
        of.saving.stored(of.committed + 2)
        of.later()
        assert of.ended == [(number, "eviction") for number in drained]


def test_a_replaced_supervisor_is_rejected_and_does_not_get_its_rank_back(of):
    of.roster[1].supervisor = Peer(-1, "node2")
    number, message = welcome(of, Peer(1, "node1"))
    assert number is None and message == NoPlace("a new node has taken over rank 1; this node ends")


def test_a_supervisor_that_reconnects_keeps_its_rank(of):
    number, message = welcome(of, Peer(1, "node1"))
    assert number == 1 and isinstance(message, SupervisorWelcome)


def test_the_rejection_of_a_node_names_the_cut_link(of):
    assert welcome(of, Peer(-1, "node2"))[1].reason.startswith("no node of the job is lost, so")
    of.returns.cut[1] = "node1 cannot reach node0 (10.0.0.1:4000)"
    reason = welcome(of, Peer(-1, "node2"))[1].reason
    assert reason.startswith("no node of the job is lost: node1 cannot reach node0 (10.0.0.1:4000), and")


def test_a_node_with_more_processes_than_lost_ranks_joins_with_as_many_as_were_lost(of):
    of.roster[1].supervisor = None
    answers = [welcome(of, Peer(-1, "node2", pid, launcher)) for pid, launcher in ((8, 5), (9, 5), (10, 6))]
    assert [number for number, _ in answers] == [1, None, None]
    surplus, other = answers[1][1], answers[2][1]
    assert surplus.surplus and "the job had lost only 1 worker; start at most 1 (" in surplus.reason
    assert not other.surplus and other.reason.startswith("no node of the job is lost")


def test_a_node_without_the_run_folder_learns_which_gpus_are_in_quarantine(of):
    of.supervisors.hardware.quarantined = {"GPU-1": "XID 79"}
    assert welcome(of, Peer(1, "node1"))[1].quarantined == {"GPU-1": "XID 79"}


def test_a_node_whose_connection_ends_is_lost_at_once(of):
    of.supervisors.lost(1, of.roster[1].supervisor)
    assert of.lost == [1]


def test_a_supervisor_may_reconnect_after_a_reset_unless_its_node_was_leaving(of):
    of.roster[1].supervisor.was_reset = True
    of.supervisors.lost(1, of.roster[1].supervisor)
    assert of.lost == []
    of.roster[1].stopping = True
    of.supervisors.lost(1, of.roster[1].supervisor)
    assert of.lost == [1]


def test_a_suspended_coordinator_waits_for_the_supervisors_that_gave_it_up(of):
    """They closed their connections because the coordinator was silent, and will reconnect soon."""
    of.lease.lapsed = lambda seconds: True
    of.supervisors.lost(1, of.roster[1].supervisor)
    assert of.lost == []


def test_all_connected_supervisors_get_copies_of_lines_that_are_not_on_disk_yet(of):
    of.roster[1].supervisor, lost = None, of.roster[1].supervisor
    of.recorder.send(COPIES)
    assert of.roster[0].supervisor.received == [COPIES] and not lost.received
    again = Peer(1, "node1")
    of.supervisors.receive(1, Registration(Place("", 0), Spawn(0, (1, 0), 0), alive=True, deaths=[]), again)
    assert again.received == [COPIES]
