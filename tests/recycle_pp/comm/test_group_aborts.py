"""Aborts of NCCL groups run concurrently, no group outlives its generation, and a hanging abort ends the worker."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from recycle_pp.comm.nccl import group as nccl
from recycle_pp.comm.nccl.group import NcclGroup
from recycle_pp.comm.waiting import LinkBroken
from recycle_pp.execution.session import Session
from recycle_pp.protocol.participant import Participant
from recycle_pp.wire.messages.generations import Announce, Broken

from .fake_nccl import BEFORE, ME, PEER, WORKERS, Backend, Fake, among, in_thread

pytestmark = pytest.mark.timeout(60)


def test_groups_are_aborted_concurrently():
    """NCCL's abort waits for the GPU, which may be busy with another group's hanging operation (pytorch#119797)."""
    both = threading.Barrier(2, timeout=10)
    NcclGroup.abort([SimpleNamespace(backend=SimpleNamespace(abort=both.wait, is_due=True)) for _ in range(2)])
    assert not both.broken


def test_an_abort_that_hangs_ends_the_worker(fake, monkeypatch):
    ends = []
    monkeypatch.setattr(nccl, "ABORT_SECONDS", 0.05)
    monkeypatch.setattr(threading, "excepthook", lambda failed: ends.append(failed.exc_value))
    hanging = threading.Event()
    monkeypatch.setattr(Backend, "abort", lambda self: hanging.wait(30))
    fake.links.rebuild(0, among(ME, PEER), ME)
    fake.links.all_reduce([torch.empty(1)])
    client = SimpleNamespace(state=None, send=lambda *_: None, recv=lambda: announcement(1))
    session = Session(client, Participant(ME, WORKERS[ME]), fake.links, None)
    listener = threading.Thread(target=session._listen, daemon=True)
    listener.start()
    listener.join(10)
    hanging.set()
    assert not listener.is_alive()
    assert isinstance(ends[0], TimeoutError) and "NCCL did not abort" in str(ends[0])


def announcement(generation):
    return Announce(generation, members=among(ME, PEER), committed=-1, base=generation)


@pytest.mark.parametrize("place", ["make", "connect"])
def test_the_failure_of_an_abandoned_build_is_ignored(place, fake, monkeypatch):
    """If torch's C++ code waits for a key of the store, the end of the wait is a RuntimeError of torch."""
    dead, building, given_up, said = [], threading.Event(), threading.Event(), []
    monkeypatch.setattr(threading, "excepthook", lambda failed: dead.append(failed.exc_value))

    def block(*_):
        building.set()
        assert given_up.wait(20)
        raise torch.distributed.DistBackendError("store->get('0') got error: stopped waiting for 1/0.0-0.1/0")

    monkeypatch.setattr(Fake, "connect" if place == "connect" else "__init__", block)
    client = SimpleNamespace(state=None, send=lambda message: said.append(type(message)))
    session = Session(client, Participant(ME, WORKERS[ME]), fake.links, None)
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


def test_a_hanging_abort_of_a_late_link_ends_the_worker(fake, monkeypatch):
    """The executor has already continued, so a hang of its GPU would go unnoticed."""
    ends, making, given_up, ended = [], threading.Event(), threading.Event(), threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda failed: (ends.append(failed.exc_value), ended.set()))
    fake.links.rebuild(0, among(BEFORE, ME), ME)
    original = Fake.__init__

    def slow(self, *arguments):
        original(self, *arguments)
        making.set()
        assert given_up.wait(20)

    def hang(groups):
        if groups:
            raise TimeoutError("NCCL did not abort")

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
def test_groups_made_by_an_abandoned_build_are_aborted(of, fake, monkeypatch):
    making, given_up, aborted = threading.Event(), threading.Event(), []
    original = Fake.__init__

    def slow(self, *arguments):
        original(self, *arguments)
        making.set()
        assert given_up.wait(20)

    if of == "a link":
        fake.links.rebuild(0, among(BEFORE, ME), ME)
    monkeypatch.setattr(Fake, "__init__", slow)
    monkeypatch.setattr(Fake, "abort", staticmethod(lambda groups: aborted.extend(groups)))
    if of == "a link":
        run = in_thread(lambda: fake.links.connect([BEFORE]))
    else:
        run = in_thread(lambda: fake.links.rebuild(0, among(ME, PEER), ME))
    assert making.wait(10)
    fake.links.abort()
    assert aborted == []
    # The executor makes single links, so an abort must end its call although the constructor still blocks.
    if of == "a link":
        run.thread.join(10)
    given_up.set()
    run.thread.join(10)
    deadline = time.monotonic() + 10
    while not aborted and time.monotonic() < deadline:
        time.sleep(0.01)
    assert isinstance(run.outcome, LinkBroken) and aborted == Fake.made != []
