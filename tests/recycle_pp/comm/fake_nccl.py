"""A fake NCCL communicator, without a GPU. As in NCCL, an abort completes pending work, and `wait` does not block.

fake = fake_links(monkeypatch)  # links of two members over fake groups
fake.links.rebuild(0, among(ME, PEER), ME)
fake.groups[0].backend.works    # pending work
"""

import threading
from types import SimpleNamespace

import torch
from recycle_schedules import Worker

from recycle_pp.comm.groups import GroupTransport
from recycle_pp.comm.links import Links
from recycle_pp.comm.nccl.group import NcclGroup
from recycle_pp.comm.store import ControlStore

CPU = torch.device("cpu")


class Work:
    """Work of an imaginary GPU. Like torch's, an abort completes it and `wait` does not block the host."""

    def __init__(self):
        self.completed, self.aborted, self.waited = threading.Event(), False, False

    def is_completed(self):
        return self.completed.is_set()

    def wait(self):
        self.waited = True


class Backend:
    """Never completes work by itself; tests do. works: all work started, in order."""

    is_due = True

    def __init__(self):
        self.works = []

    def start(self, *_):
        self.works.append(Work())
        return self.works[-1]

    send = recv = allreduce = reduce = broadcast = start

    def abort(self):
        for work in self.works:
            work.completed.set()


class Fake(NcclGroup):
    """An NCCL group with a fake communicator."""

    made: "list[Fake]"

    def __init__(self, store, prefix, rank, size, device, timeout, interface):
        self.prefix, self.backend = prefix, Backend()
        self.made.append(self)

    def connect(self, generation, pair):
        pass


WORKERS = [Worker(0, 0), Worker(0, 1), Worker(0, 2), Worker(1, 0), Worker(1, 1)]
BEFORE, ME, AFTER, OTHER, PEER = range(5)


def among(*members):
    """These members, with the workers that they play."""
    return {member: WORKERS[member] for member in members}


def fake_links(monkeypatch):
    """Links of two members over fake groups. `groups`: all groups made."""
    monkeypatch.setattr(Fake, "made", [], raising=False)
    links = Links(GroupTransport(ControlStore(lambda key, value: None), CPU, 60.0, Fake))
    return SimpleNamespace(links=links, groups=Fake.made)


def in_thread(function):
    """Runs a function in a thread; `outcome`: its result or exception, after the thread has ended."""
    run = SimpleNamespace(outcome=None)

    def work():
        try:
            run.outcome = function()
        except Exception as error:
            run.outcome = error

    run.thread = threading.Thread(target=work, daemon=True)
    run.thread.start()
    return run
