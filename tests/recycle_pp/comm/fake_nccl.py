"""A communicator that behaves like NCCL's, without a GPU: an abort completes what is under way, a wait does not block.

fake = fake_links(monkeypatch)  # links of two workers over fake groups
fake.links.rebuild(0, [ME, PEER], ME)
fake.groups[0].backend.works    # what is under way
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

    send = recv = allreduce = reduce = broadcast = start

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


def fake_links(monkeypatch):
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
