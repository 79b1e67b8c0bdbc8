"""A group outlives the death of other workers if it is idle at all its members and their operation counts are equal.

The workers are in one process, and their groups are fakes.
"""

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from recycle_pp.comm.endpoint import Endpoint
from recycle_pp.comm.groups import GroupTransport
from recycle_pp.comm.links import Links
from recycle_pp.comm.nccl.group import NcclGroup
from recycle_pp.comm.store import ControlStore
from recycle_pp.comm.waiting import Generation, Job, LinkBroken
from recycle_pp.testing.rehearsal import grid

from .fake_nccl import CPU, Backend, in_thread

pytestmark = pytest.mark.timeout(60)

LEFT, RIGHT, DEAD, PEER = range(4)
ALL = grid(2, 2)
LIVE = {member: worker for member, worker in ALL.items() if member != DEAD}
PAIR = {LEFT: ALL[LEFT], RIGHT: ALL[RIGHT]}


class Meeting(NcclGroup):
    """A fake group whose `connect` waits for all members. Only tests complete its operations."""

    aborted: "list[tuple[str, int]]"

    def __init__(self, store, prefix, rank, size, device, timeout, interface):
        self.prefix, self.rank, self.size, self.backend = prefix, rank, size, Backend()
        self._store = store

    def connect(self, generation, pair):
        self._store.set(f"{self.prefix}/{self.rank}", b"")
        self._store.collect([f"{self.prefix}/{rank}" for rank in range(self.size)], lambda: generation.over)

    @staticmethod
    def abort(groups):
        Meeting.aborted += [(group.prefix, group.rank) for group in groups]
        for group in groups:
            group.backend.abort()


@pytest.fixture
def job(monkeypatch):
    """links: member -> its links. deaf: members to which no value is delivered any more."""
    monkeypatch.setattr(Meeting, "aborted", [], raising=False)
    stores, deaf = {}, set()

    def publish(me):
        return lambda key, value: [s.deliver(key, value) for w, s in stores.items() if {w, me}.isdisjoint(deaf)]

    stores |= {worker: ControlStore(publish(worker)) for worker in ALL}
    transports = {worker: GroupTransport(stores[worker], CPU, 60.0, Meeting) for worker in ALL}
    return SimpleNamespace(
        links={worker: Links(transports[worker]) for worker in ALL}, transports=transports, deaf=deaf
    )


def each(job, workers, act):
    """Calls act(links, worker) for each worker at the same time."""
    runs = [in_thread(lambda w=worker: act(job.links[w], w)) for worker in workers]
    for run in runs:
        run.thread.join(10)
        assert not run.thread.is_alive()
        assert not isinstance(run.outcome, Exception), run.outcome


def begin(job, generation, members=ALL, base=0, pairs=((LEFT, RIGHT), (DEAD, PEER), (LEFT, PEER))):
    """Starts a generation and connects these pairs of members, if both are live."""

    def build(links, me):
        links.rebuild(generation, members, me, base)
        links.connect({worker for pair in pairs if me in pair and {*pair} <= {*members} for worker in pair} - {me})

    each(job, members, build)


def exchange(job, of, to):
    """Sends a message that arrives."""
    for work in send(job, of, to), receive(job, to, of):
        work.completed.set()


def send(job, me, to):
    job.links[me].send(torch.empty(1), to, 0)
    return group(job, me, to).backend.works[-1]


def receive(job, me, frm):
    job.links[me].receive(torch.empty(1), frm, 0)
    return group(job, me, frm).backend.works[-1]


def now(job, me):
    return job.transports[me]._groups[job.links[me].generation]


def group(job, me, other):
    return now(job, me).pairs[other].group


def die(job):
    """Delivers the announcement of DEAD's death to the others."""
    for worker in LIVE:
        job.links[worker].abort()


def test_a_pair_of_survivors_is_kept_and_only_groups_with_the_dead_worker_are_aborted(job):
    begin(job, 0)
    exchange(job, LEFT, RIGHT)
    exchange(job, RIGHT, LEFT)
    exchange(job, RIGHT, LEFT)
    before = group(job, LEFT, RIGHT), group(job, RIGHT, LEFT), now(job, RIGHT).stage.group
    die(job)
    begin(job, 1, LIVE)
    assert (group(job, LEFT, RIGHT), group(job, RIGHT, LEFT), now(job, RIGHT).stage.group) == before
    assert {name for name, _ in Meeting.aborted} == {"0/0.0-1.0", "0/1.0-1.1"}
    exchange(job, RIGHT, LEFT)
    die(job)
    begin(job, 2, LIVE)
    assert group(job, LEFT, RIGHT) is before[0]


def test_a_pair_with_a_pending_receive_is_built_again(job):
    begin(job, 0)
    pending = receive(job, RIGHT, LEFT)
    job.links[RIGHT].abort()
    assert pending.is_completed() and ("0/0.0-0.1", 1) in Meeting.aborted  # before any other worker has done anything
    die(job)
    begin(job, 1, LIVE)
    assert group(job, LEFT, RIGHT).prefix == group(job, RIGHT, LEFT).prefix == "1/0.0-0.1"
    assert Meeting.aborted.count(("0/0.0-0.1", 0)) == Meeting.aborted.count(("0/0.0-0.1", 1)) == 1
    assert group(job, LEFT, PEER).prefix == "0/0.0-1.1"


def test_a_pair_is_built_again_if_a_message_is_complete_only_at_its_sender(job):
    begin(job, 0)
    send(job, LEFT, RIGHT).completed.set()
    die(job)
    begin(job, 1, LIVE)
    assert group(job, LEFT, RIGHT).prefix == group(job, RIGHT, LEFT).prefix == "1/0.0-0.1"
    assert Meeting.aborted.count(("0/0.0-0.1", 0)) == Meeting.aborted.count(("0/0.0-0.1", 1)) == 1


def test_the_group_of_a_stage_is_built_again_if_one_member_has_summed_more(job):
    begin(job, 0)
    job.links[RIGHT].all_reduce([torch.empty(1)])
    now(job, RIGHT).stage.group.backend.works[-1].completed.set()
    die(job)
    begin(job, 1, LIVE)
    assert now(job, RIGHT).stage.group.prefix == now(job, PEER).stage.group.prefix == "1/0.1-1.1"


def test_a_generation_after_a_broken_link_keeps_nothing(job):
    begin(job, 0)
    die(job)
    begin(job, 1, LIVE, base=1)
    assert group(job, LEFT, RIGHT).prefix == "1/0.0-0.1" and now(job, PEER).stage.group.prefix == "1/0.1-1.1"
    assert len({*Meeting.aborted}) == len(Meeting.aborted) == 8


def test_a_pair_that_the_last_plan_did_not_need_is_not_kept(job):
    begin(job, 0)
    die(job)
    begin(job, 1, LIVE, pairs=[(LEFT, RIGHT)])
    assert "0/0.0-1.1" not in {name for name, _ in Meeting.aborted}
    die(job)
    begin(job, 2, LIVE)
    assert group(job, LEFT, PEER).prefix == "2/0.0-1.1" and group(job, LEFT, RIGHT).prefix == "0/0.0-0.1"


def test_a_second_death_while_the_counts_are_exchanged_causes_no_long_wait(job):
    begin(job, 0)
    before = group(job, LEFT, RIGHT)
    die(job)
    job.deaf.add(PEER)  # it has died, so its counts never arrive
    runs = [in_thread(lambda w=worker: job.links[w].rebuild(1, LIVE, w, 0)) for worker in (LEFT, RIGHT)]
    time.sleep(0.1)
    assert all(run.thread.is_alive() for run in runs)
    begun = time.monotonic()
    begin(job, 2, PAIR)
    for run in runs:
        run.thread.join(10)
        assert isinstance(run.outcome, LinkBroken) and run.outcome.aborted
    assert time.monotonic() - begun < 1
    assert group(job, LEFT, RIGHT) is before
    assert ("0/0.1-1.1", 0) in Meeting.aborted and ("0/0.0-1.1", 0) in Meeting.aborted


def test_two_workers_agree_on_kept_groups_if_one_has_entered_an_extra_generation(job):
    """RIGHT enters generation 1, keeps the pair and sends. LEFT gets generation 2 before it has kept anything."""
    begin(job, 0)
    die(job)
    job.deaf.add(PEER)
    left = in_thread(lambda: job.links[LEFT].rebuild(1, PAIR, LEFT, 0))
    job.links[RIGHT].rebuild(1, PAIR, RIGHT, 0)
    left.thread.join(10)
    send(job, RIGHT, LEFT).completed.set()
    begin(job, 2, PAIR)
    assert group(job, LEFT, RIGHT).prefix == group(job, RIGHT, LEFT).prefix == "2/0.0-0.1"


def test_an_operation_that_is_being_launched_counts_as_in_flight(job, monkeypatch):
    """Otherwise a message could enter a group after its counts were published. The launch hangs, as in the driver."""
    begin(job, 0)
    inside, released = threading.Event(), threading.Event()
    original = Backend.start

    def hang(self, *arguments):
        inside.set()
        assert released.wait(10)
        return original(self, *arguments)

    monkeypatch.setattr(Backend, "send", hang)
    run = in_thread(lambda: job.links[LEFT].send(torch.empty(1), RIGHT, 0))
    assert inside.wait(10)
    job.links[LEFT].abort()
    assert ("0/0.0-0.1", 0) in Meeting.aborted and ("0/0.0-1.1", 0) not in Meeting.aborted
    released.set()
    run.thread.join(10)


def test_an_abandoned_wait_does_not_end_its_operation():
    """At the end of a generation, the wait for a Gloo receive is released, but the receive stays posted."""
    end = Endpoint("0/pair", (LEFT, RIGHT), LEFT, SimpleNamespace(backend=None), 0, pair=True)
    generation, job = Generation(0), Job()
    end.open(generation)
    end.start(generation, 1, lambda backend: [job])
    job.release()
    end.close()
    assert job.over and not end.is_idle(ask=True)
    job.finish()
    assert end.is_idle(ask=True)
    job.finish(RuntimeError("connection reset"))
    assert not end.is_idle(ask=True)


def test_groups_are_aborted_when_their_links_are_closed(job):
    begin(job, 0)
    for worker in ALL:
        job.links[worker].close()
    assert len({*Meeting.aborted}) == len(Meeting.aborted) == 10
