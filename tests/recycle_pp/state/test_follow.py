"""A joiner ends with its donor's bits, whatever steps are committed between the parts of the state."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recycle_schedules import Worker as Role

from recycle_pp.comm.transfer import TransferError
from recycle_pp.model.stage import Stage
from recycle_pp.numerics.gradients import Reduced
from recycle_pp.numerics.optimizer import StageOptimizer
from recycle_pp.state import donations as sending
from recycle_pp.state.donations import WAITING, Donations
from recycle_pp.state.follow import Following
from recycle_pp.wire.messages.lifecycle import Donate, Expect, NoRoom, StreamLost
from recycle_pp.wire.messages.states import StatePart
from recycle_pp.wire.messages.steps import Commit
from recycle_pp.wire.messages.units import packed
from tests.recycle_pp.in_process import CPU, part, small
from tests.recycle_pp.numerics.test_units import cut


class Worker:
    """A worker whose gradients depend only on the step. units: the units that it holds; None: all."""

    def __init__(self, reproducible=False, units=None, stage=1):
        groups = ["*norm*:0.5:2", "layers.2.*:0.3"]
        config = small(
            numerics__reproducible=reproducible, optimizer__stagger=True, run__steps=1000, optimizer__groups=groups
        )
        self.stage = cut(Stage(config, stage, CPU), 512)
        self.units, self.every = units, range(len(self.stage.layout.units))
        self.optimizer = StageOptimizer(config, self.stage, whole=units is None)
        for unit in units or ():
            self.optimizer.begin(unit)

    def gradient(self, step):
        random = torch.Generator().manual_seed(step)
        flat = self.stage.layout.vector(CPU)
        for view in self.stage.layout.views(flat):  # the gaps stay zero
            view.copy_(torch.randn(view.shape, generator=random) / (1 + step))
        whole = Reduced(flat, torch.ones(8).long(), torch.zeros(8), [], True)
        return whole if self.units is None else part(self.stage, whole, self.units)

    def commit(self, step, how, decided=lambda commit, reduced: None):
        """Ends a step in the way `how`. Returns the commit and the reduced gradient.

        decided: called with both at the moment at which a worker announces its decision
        """
        reduced = self.gradient(step)
        scale = {"skipped": None, "speculated": 1.0}.get(how, 0.7)
        commit = Commit(0, step, scale, norm=1.0, loss=1.0)
        if how in ("speculated", "undone"):
            self.optimizer.speculate(reduced, step)
        if how == "speculated":
            decided(commit, reduced)
            self.optimizer.confirm()
            return commit, reduced
        if how == "undone":
            self.optimizer.undo()
        self.optimizer.step(reduced, step, scale, lambda: decided(commit, reduced))
        return commit, reduced

    def state(self):
        held = {unit: [vector.clone() for vector in self.optimizer.vectors(unit)] for unit in self.optimizer.held}
        return held, self.stage.gradients.exponents.clone()


class Pipe:
    """A stream whose reader takes one message per release of `taking`."""

    def __init__(self):
        self.parcels, self.taking = [], threading.Semaphore(0)
        self.closed, self.begun = False, threading.Event()

    def __enter__(self):
        self.begun.set()
        return self

    def __exit__(self, *_):
        pass

    def send(self, about, tensors):
        self.taking.acquire()
        if self.closed:
            raise TransferError("closed")
        self.parcels.append((about, {name: tensor.clone() for name, tensor in tensors.items()}))


@pytest.fixture
def pipe(monkeypatch):
    made = Pipe()
    monkeypatch.setattr(sending, "connect", lambda *_, **__: made)
    yield made
    made.closed = True
    made.taking.release(1000)


def donor(worker, monkeypatch, size, units=(), session=7, sent=None):
    sent = [] if sent is None else sent
    monkeypatch.setattr(sending, "PART", size)
    donations = Donations(worker.optimizer, worker.stage.gradients, "token", lambda *_: None, sent.append)
    ids = worker.stage.layout.ids
    names = [ids[unit] for unit in units or worker.every]
    donations.asked(Donate(1, Role(0, 1), session, address=("127.0.0.1", 1), units=packed(names), of=len(worker.every)))
    return donations


def joiner(worker, steps=None):
    """A worker that follows in session 7. steps: a list that collects the steps that the worker has caught up with."""
    reached = [] if steps is None else steps
    participant = SimpleNamespace(
        generation=-1, announced=None, followed=lambda *_: None, caught_up=lambda step, units: reached.append(step)
    )
    following = Following(
        worker.stage, worker.optimizer, participant, threading.RLock(), "token", "127.0.0.1", lambda *_: None
    )
    following.close()
    following.expect(Expect(7, [*worker.stage.layout.layers]))
    return following


def take(following, parcel):
    """Applies a message of the newest session. Returns whether the worker is in step."""
    return following._take(following._session, *parcel)


def assert_same(one, two):
    (held, exponents), (others, theirs) = one, two
    assert held.keys() == others.keys() and torch.equal(exponents, theirs)
    assert all(map(torch.equal, [v for u in held for v in held[u]], [v for u in held for v in others[u]]))


HOW = ("stepped", "speculated", "skipped", "undone")


@settings(max_examples=15, deadline=None)
@given(
    size=st.sampled_from([512, 1024, 2560, 1 << 20]),
    reproducible=st.booleans(),
    events=st.lists(st.one_of(st.integers(1, 60), st.sampled_from(HOW)), max_size=60),
)
def test_a_joiner_has_the_bits_of_its_donor(size, reproducible, events):
    """events: a kind of commit, or the number of messages that arrive next."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        pipe = Pipe()
        monkeypatch.setattr(sending, "connect", lambda *_, **__: pipe)
        here, there = Worker(reproducible), Worker(reproducible)
        for unit in there.every:  # the joiner's own state must not remain
            there.optimizer.put(unit, [torch.full_like(vector, 9.0) for vector in there.optimizer.vectors(unit)])
        steps = []
        donations, following = donor(here, monkeypatch, size), joiner(there, steps)
        last = -1
        for event in ["stepped", *events, "stepped"]:
            if isinstance(event, int):
                pipe.taking.release(event)
            else:
                last += 1
                here.commit(last, event, donations.committed)
        pipe.taking.release(1 << 20)
        for taken in iter_parcels(pipe):
            if take(following, taken) and taken[0].step == last:
                break
        pipe.closed = True
        mine, theirs = here.state(), there.state()
    assert_same(mine, theirs)
    assert steps[-1] == last


def test_a_gradient_is_sent_before_the_donor_has_applied_it(pipe, monkeypatch):
    """All workers wait for a joiner that lacks only this step. The joiner updates its state at the same time."""
    worker, updates = Worker(), []
    donations = donor(worker, monkeypatch, 1 << 20)
    pipe.taking.release(1000)
    worker.commit(0, "stepped", donations.committed)
    until(lambda: len(pipe.parcels) == 1)

    def update(*arguments, **more):
        until(lambda: len(pipe.parcels) == 2)
        updates.append(pipe.parcels[1][0].step)

    monkeypatch.setattr(worker.optimizer, "_update", update)
    worker.commit(1, "stepped", donations.committed)
    assert updates == [1]


def until(true):
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def iter_parcels(pipe):
    taken, deadline = 0, time.monotonic() + 30
    while time.monotonic() < deadline:
        if taken < len(pipe.parcels):
            taken += 1
            yield pipe.parcels[taken - 1]
        else:
            time.sleep(0.001)
    raise TimeoutError


@settings(max_examples=6, deadline=None)
@given(
    reproducible=st.booleans(),
    odd=st.booleans(),
    events=st.lists(st.one_of(st.tuples(st.integers(0, 2), st.integers(1, 9)), st.sampled_from(HOW)), max_size=30),
)
def test_a_joiner_with_several_donors_has_the_bits_of_a_holder_since_the_start(reproducible, odd, events):
    """events: a kind of commit, or a donor and the number of its messages that arrive next. Some units have a second
    holder."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        count = len(Worker().every)
        gives = [[unit for unit in range(count) if unit % 3 == d] for d in range(3)]
        donors = [Worker(reproducible, sorted({*of, *range(0, count, 2 + odd)})) for of in gives]
        always, there = Worker(reproducible, list(range(count))), Worker(reproducible, [0, 1, 2])
        pipes = [Pipe() for _ in donors]
        found = []
        for worker, pipe, of in zip(donors, pipes, gives, strict=True):
            monkeypatch.setattr(sending, "connect", lambda *_, pipe=pipe, **__: pipe)
            found.append(donor(worker, monkeypatch, 1024, of))
            found[-1].committed(*worker.commit(0, "stepped"))
            assert pipe.begun.wait(10)
        always.commit(0, "stepped")
        steps, last, taken = [], 0, [0, 0, 0]
        following = joiner(there, steps)

        def take_all(d):
            pipe, done = pipes[d], False
            while taken[d] < len(pipe.parcels):
                done = take(following, pipe.parcels[taken[d]])
                taken[d] += 1
            return done

        for event in [*events, "stepped"]:
            if isinstance(event, tuple):
                pipes[event[0]].taking.release(event[1])
                take_all(event[0])
            else:
                last += 1
                always.commit(last, event)
                for worker, donations in zip(donors, found, strict=True):
                    worker.commit(last, event, donations.committed)
        for pipe in pipes:
            pipe.taking.release(1 << 20)
        deadline = time.monotonic() + 30
        while steps[-1:] != [last]:
            assert time.monotonic() < deadline
            for d in range(3):
                take_all(d)
            time.sleep(0.001)
        for pipe in pipes:
            pipe.closed = True
    assert_same(always.state(), there.state())


class OldStream:
    """A stream whose next message is this one, for example from a donor that hung."""

    def __init__(self, parcel):
        self.receive = lambda: parcel

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def close(self):
        pass


def test_a_new_session_starts_empty_and_voids_messages_of_the_last_one(monkeypatch):
    here, there = Worker(units=[0, 1, 2, 3]), Worker(units=[0])
    here.commit(0, "stepped")
    following = joiner(there)

    def state(session, units, of):
        names = [here.stage.layout.ids[unit] for unit in units]
        return StatePart(session, 0, packed(names), of), here.optimizer.copy(names, 0)

    assert not take(following, state(7, [0, 1], 3))
    following.expect(Expect(8, [*there.stage.layout.layers]))
    assert take(following, state(8, [2, 3], 2)) and sorted(there.optimizer.held) == [2, 3]
    stream = OldStream(state(7, [2], 3))
    following._follow(stream)  # sends nothing: it has no connection to the coordinator
    assert sorted(there.optimizer.held) == [2, 3]


def test_both_ends_of_a_broken_stream_report_its_session(monkeypatch):
    def fail(*_, **__):
        raise TransferError("no connection")

    here, there, sent = Worker(units=[0, 1]), Worker(units=[0]), []
    donations = donor(here, monkeypatch, 512, units=[0, 1], sent=sent)
    monkeypatch.setattr(donations, "_open", fail)
    here.commit(0, "stepped", donations.committed)
    (thread,) = donations._donors
    thread.join(10)
    assert sent == [StreamLost(7)]

    following, said = joiner(there), []
    following._send = said.append
    names = [here.stage.layout.ids[0]]
    parcels = iter([(StatePart(7, 0, packed(names), 2), here.optimizer.copy(names, 0))])
    stream = OldStream(None)
    stream.receive = lambda: next(parcels, None) or fail()
    following._follow(stream)
    assert said == [StreamLost(7)]
    following.expect(Expect(8, [*there.stage.layout.layers]))  # the coordinator has begun another session
    parcels = iter([(StatePart(7, 0, packed(names), 2), here.optimizer.copy(names, 0))])
    following._follow(stream)
    assert said == [StreamLost(7)]


def test_a_donor_that_was_asked_for_a_unit_before_its_arrival_reports_the_session(pipe, monkeypatch):
    """Otherwise the follower would wait forever, because its other donors keep sending gradients."""
    here, sent = Worker(units=[0, 1]), []
    donations = donor(here, monkeypatch, 512, units=[2, 0], sent=sent)
    here.commit(0, "stepped", donations.committed)
    (thread,) = donations._donors
    thread.join(10)
    assert sent == [StreamLost(7)]


def test_an_understudy_without_room_refuses_with_the_needed_and_the_free_bytes():
    here, sent = Worker(units=[0, 1]), []
    names = [here.stage.layout.ids[0]]
    following = joiner(Worker(units=[0]))
    following._send = sent.append
    following.room = lambda elements: (10 * elements, 500)
    following.expect(Expect(8, [*here.stage.layout.layers], worker=Role(0, 1), elements=100))
    following._follow(OldStream((StatePart(8, 0, packed(names), 1), here.optimizer.copy(names, 0))))
    assert sent == [NoRoom(8, 1000, 500)]


def test_a_slow_joiner_restarts_from_the_newest_state_and_queues_stay_bounded(pipe, monkeypatch):
    worker = Worker()
    donations = donor(worker, monkeypatch, 1 << 20)
    pipe.taking.release(1)  # takes the whole state and no gradient
    for step in range(10 * WAITING):
        donations.committed(*worker.commit(step, "stepped"))
        (line,) = donations._donors
        assert len(line._waiting) <= WAITING
    pipe.taking.release(1000)
    deadline = time.monotonic() + 10
    while not pipe.parcels or pipe.parcels[-1][0].step < step:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert len(pipe.parcels) <= 2 * WAITING + 3
    about, state = next(parcel for parcel in reversed(pipe.parcels) if "model" in parcel[1])
    assert about.step >= step - WAITING, "the steps before are not sent"
    assert about.step < step or torch.equal(state["model"], worker.stage.flat.joined())


def test_a_donors_optimizer_waits_at_most_for_the_copy_of_one_part(pipe, monkeypatch):
    """The optimizer does not wait for the network, although the joiner takes nothing."""
    worker = Worker()
    donations = donor(worker, monkeypatch, 128)
    donations.committed(*worker.commit(0, "stepped"))
    time.sleep(0.05)  # the thread blocks in its first send
    begun = time.monotonic()
    donations.committed(*worker.commit(1, "speculated"))
    assert time.monotonic() - begun < 1.0


def test_speculative_state_is_never_copied():
    worker = Worker()
    worker.commit(0, "stepped")
    first = worker.stage.layout.ids[:1]
    assert worker.optimizer.copy(first, newest=0) is not None
    assert worker.optimizer.copy(first, newest=1) is None, "a commit that the optimizer has not applied yet"
    worker.optimizer.speculate(worker.gradient(1), 1)
    assert worker.optimizer.copy(first, newest=1) is None
    worker.optimizer.confirm()
    assert worker.optimizer.copy(first, newest=0) is None, (
        "the state contains step 1, and the joiner does not know this"
    )
    assert worker.optimizer.copy(first, newest=1) is not None
