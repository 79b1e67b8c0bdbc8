"""Groups that are rebuilt in each generation, and NCCL's requirements, with fake communicators."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recycle_schedules import Action, OpKind, TensorKind

from recycle_pp.comm.groups import meetings
from recycle_pp.comm.nccl.group import NcclGroup
from recycle_pp.comm.waiting import Generation, LinkBroken
from recycle_pp.execution.executor import Executor
from recycle_pp.execution.mailbox import Mailbox
from recycle_pp.execution.session import Session
from recycle_pp.execution.spans import Spans
from recycle_pp.protocol.participant import Participant
from recycle_pp.testing.rehearsal import grid
from tests.recycle_pp.in_process import small

from .fake_nccl import AFTER, BEFORE, CPU, ME, OTHER, PEER, WORKERS, Work, among, in_thread

pytestmark = pytest.mark.timeout(60)


# -- meetings ------------------------------------------------------------------------------------------------------


def play(links):
    """Simulates workers that build the groups of their links in order. Building a group needs both ends at once.

    Returns the number of rounds, and the groups for which a worker would wait forever.
    """
    members = {worker for link in links for worker in link}
    beside = {worker: [other for link in links if worker in link for other in link - {worker}] for worker in members}
    number = {worker: k for k, worker in enumerate(members)}
    played = {k: worker for worker, k in number.items()}
    left = {worker: meetings(k, [number[w] for w in beside[worker]], played) for worker, k in number.items()}
    rounds = 0
    while True:
        here = [todo[0] for todo in left.values() if todo]
        held = {pair for pair in here if here.count(pair) == 2}
        if not held:
            return rounds, here
        rounds += 1
        left = {worker: todo[1:] if todo and todo[0] in held else todo for worker, todo in left.items()}


def links_of(pipelines, stages):
    """All links that a plan could use."""
    pairs = itertools.combinations(grid(pipelines, stages).values(), 2)
    return [frozenset(pair) for pair in pairs if abs(pair[0].stage - pair[1].stage) == 1]


shapes = st.tuples(st.integers(1, 5), st.integers(2, 5))


@given(shapes.flatmap(lambda shape: st.lists(st.sampled_from(links_of(*shape)), unique=True)))
def test_the_order_of_groups_cannot_deadlock_for_any_links_of_a_plan(links):
    assert play(links)[1] == []


@given(shapes)
def test_the_groups_of_a_step_without_a_death_take_two_rounds(shape):
    assert play([link for link in links_of(*shape) if len({worker.pipeline for worker in link}) == 1])[0] <= 2


# -- a communicator that behaves like NCCL's ------------------------------------------------------------------------


def test_a_group_is_built_once_per_generation_and_only_for_pairs_with_messages(fake):
    members = among(BEFORE, ME, OTHER, PEER, AFTER)
    fake.links.rebuild(0, members, ME)
    fake.links.connect([])
    assert [group.prefix for group in fake.groups] == ["0/0.1-1.1"]
    fake.links.connect({AFTER, BEFORE})
    fake.links.connect({BEFORE})
    assert [group.prefix for group in fake.groups[1:]] == ["0/0.0-0.1", "0/0.1-0.2"]
    fake.links.rebuild(1, members, ME)
    fake.links.connect({BEFORE})
    assert [group.prefix for group in fake.groups[3:]] == ["1/0.1-1.1", "1/0.0-0.1"]


def test_the_host_waits_for_a_message_of_nccl(fake):
    fake.links.rebuild(0, among(BEFORE, ME), ME)
    fake.links.connect([BEFORE])
    pending = fake.links.receive(torch.empty(1), BEFORE, 1)
    run = in_thread(pending.wait)
    run.thread.join(0.1)
    assert run.thread.is_alive()
    (work,) = fake.groups[0].backend.works
    assert not work.waited
    work.completed.set()
    run.thread.join(10)
    assert run.outcome is None and work.waited


def test_an_op_without_its_input_is_not_reported_as_done(fake):
    """The receive of the input completes with the abort, as on a GPU, and its buffer holds garbage."""
    settings = small(parallel__pipelines=1, parallel__stages=2)
    participant = Participant(ME, WORKERS[ME])
    client = SimpleNamespace(state=None, send=lambda *_: None)
    session = Session(client, participant, fake.links, None)
    stage = SimpleNamespace(stage=1, first=False, last=True)  # has no compute methods: a call would fail
    mailbox = Mailbox(fake.links, {TensorKind.ACTIVATION: [torch.empty(1)]}, CPU, (1, 2, 4))
    executor = Executor(session, stage, None, mailbox, None, None, Spans(), settings)
    fake.links.rebuild(0, among(BEFORE, ME), ME)
    fake.links.connect([BEFORE])
    mailbox.post(0, (TensorKind.ACTIVATION, (0, 0), 0), WORKERS[BEFORE])
    run = in_thread(lambda: executor._compute(participant.orders, 0, Action(OpKind.FORWARD, 1, (0, 0))))
    run.thread.join(0.1)
    assert run.thread.is_alive()
    fake.links.abort()
    run.thread.join(10)
    assert isinstance(run.outcome, LinkBroken) and run.outcome.aborted
    assert participant.record(0).reported().done == {}


def test_an_error_of_nccl_is_a_broken_link_and_out_of_memory_is_not():
    def failing(text):
        work = Work()
        work.completed.set()

        def fail():
            raise RuntimeError(text)

        work.wait = fail
        return work

    with pytest.raises(LinkBroken, match="remote process exited") as caught:
        NcclGroup.wait(Generation(3), failing("remote process exited"))
    assert not caught.value.aborted
    with pytest.raises(RuntimeError, match=r"^Cuda failure 2 'out of memory'$"):
        NcclGroup.wait(Generation(3), failing("Cuda failure 2 'out of memory'"))
