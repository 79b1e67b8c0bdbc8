"""Groups that are built anew in each generation, and what NCCL asks for, with communicators that are not there."""

import itertools
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recycle_schedules import Action, Worker

from recycle_pp.comm.groups import GroupTransport, meetings
from recycle_pp.comm.links import Links
from recycle_pp.comm.nccl import group as nccl
from recycle_pp.comm.nccl.group import NcclGroup
from recycle_pp.comm.store import ControlStore
from recycle_pp.comm.waiting import Generation, LinkBroken
from recycle_pp.execution.executor import Executor
from recycle_pp.execution.mailbox import Mailbox
from recycle_pp.execution.session import Session
from recycle_pp.execution.spans import Spans
from recycle_pp.protocol.participant import Participant
from recycle_pp.testing.rehearsal import grid
from recycle_pp.wire.messages.workers import Announce, Broken
from tests.recycle_pp.in_process import small

CPU = torch.device("cpu")
pytestmark = pytest.mark.timeout(60)


# -- who meets whom ------------------------------------------------------------------------------------------------


def play(links):
    """Everybody builds the groups of its links in order, each of which takes both ends. Returns the rounds that it
    takes, and what nobody has come to."""
    members = {worker for link in links for worker in link}
    beside = {worker: [other for link in links if worker in link for other in link - {worker}] for worker in members}
    left = {worker: meetings(worker, beside[worker]) for worker in members}
    rounds = 0
    while True:
        here = [todo[0] for todo in left.values() if todo]
        held = {pair for pair in here if here.count(pair) == 2}
        if not held:
            return rounds, here
        rounds += 1
        left = {worker: todo[1:] if todo and todo[0] in held else todo for worker, todo in left.items()}


def links_of(pipelines, stages):
    """All that a plan could ask for."""
    pairs = itertools.combinations(grid(pipelines, stages), 2)
    return [frozenset(pair) for pair in pairs if abs(pair[0].stage - pair[1].stage) == 1]


shapes = st.tuples(st.integers(1, 5), st.integers(2, 5))


@given(shapes.flatmap(lambda shape: st.lists(st.sampled_from(links_of(*shape)), unique=True)))
def test_whatever_links_a_plan_has_nobody_waits_for_ever_for_a_group(links):
    assert play(links)[1] == []


@given(shapes)
def test_a_step_without_a_death_takes_two_rounds(shape):
    assert play([link for link in links_of(*shape) if len({worker.pipeline for worker in link}) == 1])[0] <= 2


# -- a communicator that behaves like NCCL's ------------------------------------------------------------------------


class Work:
    """Done on a GPU that is not here. As torch's: an abort completes it, and `wait` does not block the host."""

    def __init__(self):
        self.completed, self.aborted, self.waited = threading.Event(), False, False

    def is_completed(self):
        return self.completed.is_set()

    def wait(self):
        self.waited = True


class Backend:
    """Only does what a test lets it: `works` are those under way, in order."""

    def __init__(self):
        self.works = []

    def start(self, *_):
        self.works.append(Work())
        return self.works[-1]

    send = recv = allreduce = broadcast = start

    def abort(self):
        for work in self.works:
            work.completed.set()


class Fake(NcclGroup):
    """Everything of NCCL's but the communicator."""

    made: "list[Fake]"

    def __init__(self, store, prefix, rank, size, device, timeout, interface):
        self.prefix, self.backend = prefix, Backend()
        self.made.append(self)

    def connect(self, pair):
        return []


ME, BEFORE, PEER, AFTER = Worker(0, 1), Worker(0, 0), Worker(1, 1), Worker(0, 2)


@pytest.fixture
def fake(monkeypatch):
    """Links of two workers over fake groups; `groups` are those that were made."""
    monkeypatch.setattr(Fake, "made", [], raising=False)
    links = Links(GroupTransport(ControlStore(lambda key, value: None), CPU, 60.0, Fake))
    return SimpleNamespace(links=links, groups=Fake.made)


def in_thread(function):
    """Runs it; `outcome` is what it returned or raised, once the thread is over."""
    run = SimpleNamespace(outcome=None)

    def work():
        try:
            run.outcome = function()
        except Exception as error:
            run.outcome = error

    run.thread = threading.Thread(target=work, daemon=True)
    run.thread.start()
    return run


def test_a_group_is_built_once_a_generation_and_only_for_who_has_messages(fake):
    members = [BEFORE, ME, Worker(1, 0), PEER, AFTER]
    fake.links.rebuild(0, members, ME)
    fake.links.connect([])
    assert [group.prefix for group in fake.groups] == [f"0/{ME}-{PEER}"]
    fake.links.connect({AFTER, BEFORE})
    fake.links.connect({BEFORE})
    assert [group.prefix for group in fake.groups[1:]] == [f"0/{BEFORE}-{ME}", f"0/{ME}-{AFTER}"]
    fake.links.rebuild(1, members, ME)
    fake.links.connect({BEFORE})
    assert [group.prefix for group in fake.groups[3:]] == [f"1/{ME}-{PEER}", f"1/{BEFORE}-{ME}"]


def test_the_host_waits_for_a_message_of_nccl(fake):
    fake.links.rebuild(0, [BEFORE, ME], ME)
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


def test_an_op_whose_input_never_came_is_not_told_as_done(fake):
    """Its receive is complete after the abort, as on a GPU; what it holds is whatever was in the memory."""
    settings = small(parallel__pipelines=1, parallel__stages=2)
    participant = Participant(ME, 2)
    line = SimpleNamespace(state=None, send=lambda *_: None)
    session = Session(line, participant, fake.links, None)
    stage = SimpleNamespace(stage=1, first=False, last=True)  # computes nothing, and must not be asked to
    mailbox = Mailbox(fake.links, {"F": [torch.empty(1)]}, CPU, (1, 2, 4))
    executor = Executor(session, stage, None, mailbox, None, None, Spans(), settings)
    fake.links.rebuild(0, [BEFORE, ME], ME)
    fake.links.connect([BEFORE])
    mailbox.post(0, ("F", (0, 0), 0), BEFORE)
    run = in_thread(lambda: executor._compute(participant.orders, 0, Action("F", 1, (0, 0))))
    run.thread.join(0.1)
    assert run.thread.is_alive()
    fake.links.abort()
    run.thread.join(10)
    assert isinstance(run.outcome, LinkBroken) and run.outcome.aborted
    assert participant.record(0).reported().done == {}


def test_what_nccl_finds_wrong_is_a_broken_link_and_want_of_memory_is_not():
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


def test_a_connection_is_used_both_ways_before_it_counts_and_not_on_the_stream_that_computes(monkeypatch):
    streams, current = [], []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: streams.append(priority) or "its own")

    @contextmanager
    def stream(chosen):
        current.append(chosen)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "stream", stream)

    def used(rank, pair):
        calls = []

        def use(name):
            return lambda *arguments: calls.append((name, *arguments[1:], *current)) or name

        group = object.__new__(NcclGroup)
        group._rank, group._device = rank, CPU
        names = ("send", "recv", "allreduce")
        group.backend = SimpleNamespace(eager_connect_single_device=lambda device: None, **{n: use(n) for n in names})
        assert group.connect(pair) == [call[0] for call in calls]  # each is to be waited for
        return calls

    assert used(0, True) == [("send", 1, 0, "its own"), ("recv", 1, 0, "its own")]
    assert used(1, True) == [("recv", 0, 0, "its own"), ("send", 0, 0, "its own")]
    assert used(1, False) == [("allreduce", "its own")]
    assert set(streams) == {-1}, "the streams of normal priority are counted: each group has one"


# -- aborts ----------------------------------------------------------------------------------------------------------


def test_each_group_is_aborted_though_another_ones_abort_waits_for_it():
    """NCCL waits for the GPU, which may be busy with the other group's hanging operation (pytorch#119797)."""
    both = threading.Barrier(2, timeout=10)
    NcclGroup.abort([SimpleNamespace(backend=SimpleNamespace(abort=both.wait)) for _ in range(2)])
    assert not both.broken


def test_an_abort_that_hangs_ends_the_worker(fake, monkeypatch):
    ends = []
    monkeypatch.setattr(nccl, "ABORT_SECONDS", 0.05)
    monkeypatch.setattr(threading, "excepthook", lambda failed: ends.append(failed.exc_value))  # a worker's says why
    hanging = threading.Event()
    monkeypatch.setattr(Backend, "abort", lambda self: hanging.wait(30))
    fake.links.rebuild(0, [ME, PEER], ME)
    line = SimpleNamespace(state=None, send=lambda *_: None, recv=lambda: announcement(1))
    session = Session(line, Participant(ME, 2), fake.links, None)
    listener = threading.Thread(target=session._listen, daemon=True)
    listener.start()
    listener.join(10)
    hanging.set()
    assert not listener.is_alive()
    assert isinstance(ends[0], TimeoutError) and "NCCL has not aborted" in str(ends[0])


def announcement(generation):
    return Announce(generation, members=[ME, PEER], committed=-1, base=generation)


@pytest.mark.parametrize("place", ["make", "connect"])
def test_a_build_that_fails_after_it_was_given_up_ends_nothing(place, fake, monkeypatch):
    """A thread in C++ learns that nobody waits for its key any more as a RuntimeError of torch's."""
    dead, building, given_up, said = [], threading.Event(), threading.Event(), []
    monkeypatch.setattr(threading, "excepthook", lambda failed: dead.append(failed.exc_value))

    def block(*_):
        building.set()
        assert given_up.wait(20)
        raise torch.distributed.DistBackendError("store->get('0') got error: nobody waits for 1/0.0-0.1/0 any more")

    monkeypatch.setattr(Fake, "connect" if place == "connect" else "__init__", block)
    line = SimpleNamespace(state=None, send=lambda message: said.append(type(message)))
    session = Session(line, Participant(ME, 2), fake.links, None)
    before = set(threading.enumerate())
    session._announced(announcement(1))
    assert building.wait(10)
    (build,) = [thread for thread in threading.enumerate() if thread.name == "build" and thread not in before]
    monkeypatch.undo()
    monkeypatch.setattr(threading, "excepthook", lambda failed: dead.append(failed.exc_value))
    monkeypatch.setattr(Fake, "made", [], raising=False)
    session._announced(announcement(2))
    given_up.set()
    build.join(10)
    deadline = time.monotonic() + 10
    while fake.links.generation != 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not build.is_alive() and dead == [] and fake.links.generation == 2
    assert said and Broken not in said


def test_an_abort_of_a_late_link_that_hangs_ends_the_worker_too(fake, monkeypatch):
    """The executor has gone on long since: its GPU would hang with nobody to notice."""
    ends, making, given_up, ended = [], threading.Event(), threading.Event(), threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda failed: (ends.append(failed.exc_value), ended.set()))
    fake.links.rebuild(0, [BEFORE, ME], ME)
    original = Fake.__init__

    def slow(self, *arguments):
        original(self, *arguments)
        making.set()
        assert given_up.wait(20)

    def hang(groups):
        if groups:
            raise TimeoutError("NCCL has not aborted")

    monkeypatch.setattr(Fake, "__init__", slow)
    monkeypatch.setattr(Fake, "abort", staticmethod(hang))
    run = in_thread(lambda: fake.links.connect([BEFORE]))
    assert making.wait(10)
    fake.links.abort()
    run.thread.join(10)
    assert isinstance(run.outcome, LinkBroken)
    given_up.set()
    assert ended.wait(10) and isinstance(ends[0], TimeoutError)


@pytest.mark.parametrize("of", ["peers", "a link"])
def test_what_a_build_makes_after_it_was_given_up_is_aborted_too(of, fake, monkeypatch):
    making, given_up, aborted = threading.Event(), threading.Event(), []
    original = Fake.__init__

    def slow(self, *arguments):
        original(self, *arguments)
        making.set()
        assert given_up.wait(20)

    if of == "a link":
        fake.links.rebuild(0, [BEFORE, ME], ME)
    monkeypatch.setattr(Fake, "__init__", slow)
    monkeypatch.setattr(Fake, "abort", staticmethod(lambda groups: aborted.extend(groups)))
    if of == "a link":
        run = in_thread(lambda: fake.links.connect([BEFORE]))
    else:
        run = in_thread(lambda: fake.links.rebuild(0, [ME, PEER], ME))
    assert making.wait(10)
    fake.links.abort()
    assert aborted == []
    if of == "a link":  # the executor waits for it, and must not wait for a thread in C++
        run.thread.join(10)
    given_up.set()
    run.thread.join(10)
    deadline = time.monotonic() + 10
    while not aborted and time.monotonic() < deadline:
        time.sleep(0.01)
    assert isinstance(run.outcome, LinkBroken) and aborted == Fake.made != []
