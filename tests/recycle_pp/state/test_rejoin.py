"""A joiner ends with its donor's bits, whatever happens between the parts of the state."""

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
from recycle_pp.state import rejoin
from recycle_pp.state.rejoin import WAITING, Donations, Joining
from recycle_pp.wire.messages.workers import Commit, Donate
from tests.recycle_pp.in_process import CPU, small


class Worker:
    """A stage that steps by gradients drawn from the step's number."""

    def __init__(self, reproducible=False):
        config = small(numerics__reproducible=reproducible, optimizer__stagger=True, run__steps=1000)
        self.stage = Stage(config, 1, CPU)
        self.optimizer = StageOptimizer(config, self.stage)

    def gradient(self, step):
        random = torch.Generator().manual_seed(step)
        flat = self.stage.layout.zeros(CPU)
        for view in self.stage.layout.views(flat):  # the gaps stay zero
            view.copy_(torch.randn(view.shape, generator=random) / (1 + step))
        return Reduced(flat, torch.ones(8).long(), torch.zeros(8), [], True)

    def commit(self, step, how):
        """What a worker does at the end of a step; the commit as the job agrees on it."""
        reduced = self.gradient(step)
        if how == "skipped":
            self.stage.gradients.follow(reduced)
        elif how == "speculated":
            self.optimizer.speculate(reduced, step)
            self.optimizer.confirm()
        else:
            if how == "undone":
                self.optimizer.speculate(reduced, step)
                self.optimizer.undo()
            self.optimizer.step(reduced, step, 0.7)
        scale = {"skipped": None, "speculated": 1.0}.get(how, 0.7)
        return Commit(0, step, scale, norm=1.0, loss=1.0), reduced

    def state(self):
        return {name: tensor.clone() for name, tensor in self.optimizer.state().items()}


class Pipe:
    """A stream whose reader takes one parcel at a time, when it is told to."""

    def __init__(self):
        self.parcels, self.taking = [], threading.Semaphore(0)
        self.closed = False

    def __enter__(self):
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
    monkeypatch.setattr(rejoin, "connect", lambda *_, **__: made)
    yield made
    made.closed = True
    made.taking.release(1000)


def donor(worker, pipe, monkeypatch, part):
    monkeypatch.setattr(rejoin, "PART", part)
    donations = Donations(worker.optimizer, worker.stage.gradients, "token", lambda *_: None)
    donations.asked(Donate(Role(0, 1), session=7, address=("127.0.0.1", 1)))
    return donations


def joiner(worker):
    participant = SimpleNamespace(applied=-1, committed=-1, generation=-1)
    joining = Joining(worker.optimizer, worker.stage.gradients, participant, "token", "127.0.0.1", lambda *_: None)
    joining.close()
    return joining


HOW = ("stepped", "speculated", "skipped", "undone")


@settings(max_examples=15, deadline=None)
@given(
    part=st.sampled_from([512, 1024, 2560, 1 << 20]),
    reproducible=st.booleans(),
    events=st.lists(st.one_of(st.integers(1, 60), st.sampled_from(HOW)), max_size=60),
)
def test_a_joiner_has_the_bits_of_its_donor(part, reproducible, events):
    """Events: a commit of that kind, or so many parcels that the network carries."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        pipe = Pipe()
        monkeypatch.setattr(rejoin, "connect", lambda *_, **__: pipe)
        here, there = Worker(reproducible), Worker(reproducible)
        there.optimizer.put_part(0, [torch.full((there.optimizer.size,), 9.0)] * 3)  # nothing of its own may remain
        donations, joining = donor(here, pipe, monkeypatch, part), joiner(there)
        last = -1
        for event in ["stepped", *events, "stepped"]:
            if isinstance(event, int):
                pipe.taking.release(event)
            else:
                last += 1
                donations.committed(*here.commit(last, event))
        pipe.taking.release(1 << 20)
        have = taken = 0
        while have < here.optimizer.size or pipe.parcels[taken - 1][0].step < last:
            if taken == len(pipe.parcels):
                time.sleep(0.001)
                continue
            have = joining._take(*pipe.parcels[taken])
            taken += 1
        pipe.closed = True
        mine, theirs = here.state(), there.state()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert joining._participant.committed == last


def test_a_slow_joiner_makes_nothing_grow_and_begins_again_with_the_newest_state(pipe, monkeypatch):
    worker = Worker()
    donations = donor(worker, pipe, monkeypatch, part=1 << 20)
    pipe.taking.release(1)  # it takes the whole state, and nothing after it
    for step in range(10 * WAITING):
        donations.committed(*worker.commit(step, "stepped"))
        (line,) = donations._donors
        assert len(line._waiting) <= WAITING
    pipe.taking.release(1000)
    deadline = time.monotonic() + 10
    while pipe.parcels[-1][0].step < step or getattr(pipe.parcels[-1][0], "stop", 0) != worker.optimizer.size:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert len(pipe.parcels) <= WAITING + 3
    assert torch.equal(pipe.parcels[-1][1]["parameters"], worker.stage.flat)


def test_the_donor_s_optimizer_waits_for_the_copy_of_one_part_at_most(pipe, monkeypatch):
    """Not for the network: the joiner takes nothing at all."""
    worker = Worker()
    donations = donor(worker, pipe, monkeypatch, part=128)
    donations.committed(*worker.commit(0, "stepped"))
    time.sleep(0.05)  # the thread hangs in its first send
    begun = time.monotonic()
    donations.committed(*worker.commit(1, "speculated"))
    assert time.monotonic() - begun < 1.0


def test_no_part_is_taken_of_a_state_that_may_be_taken_back():
    worker = Worker()
    worker.commit(0, "stepped")
    assert worker.optimizer.part(0, 128, newest=0) is not None
    worker.optimizer.speculate(worker.gradient(1), 1)
    assert worker.optimizer.part(0, 128, newest=1) is None
    worker.optimizer.confirm()
    assert worker.optimizer.part(0, 128, newest=0) is None, "step 1 is in it, and the joiner does not know"
    assert worker.optimizer.part(0, 128, newest=1) is not None
