"""A fake of NCCL's library and of a GPU's stream, which detects calls that break NCCL's rules.

nccl = fake_library(monkeypatch)  # NcclGroup uses it
nccl.mistakes                     # broken rules so far; a test asserts that there are none

- an operation before the communicator is ready fails with "operation in progress"
- operations from two threads at the same time are a mistake, and so is a call after an abort has freed the communicator
- `open`, an operation or an abort from a thread that has not made the GPU current is a mistake
"""

import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

from recycle_pp.comm.nccl import group


class FakeLibrary:
    """
    hanging     communicators whose operations hang in the driver until an abort; the first such operation sets `hangs`
    unfinished  whether the GPU still runs the operations
    computing   whether the GPU still runs the computation before the operations
    failure     the error that all communicators report
    operations  (name, number of elements) of every finished operation
    missing     dtypes that this build of the library cannot sum
    """

    def __init__(self):
        self.operations, self.mistakes, self.aborted = [], [], []
        self.hanging, self.unfinished, self.failure, self.missing = set(), False, None, set()
        self.computing = False
        self.hangs = threading.Event()
        self._lock, self._members, self._of = threading.Lock(), {}, {}
        self._operating, self._identities = None, 0
        self.on_gpu = threading.local()

    def identity(self):
        with self._lock:
            self._identities += 1
            return self._identities.to_bytes(128, "big")

    def open(self, size, identity, rank):
        with self._on_gpu("open"), self._lock:
            members = self._members.setdefault(identity, set())
            members.add(rank)
            handle = len(self._of) + 1
            self._of[handle] = members, size
            return handle

    def ready(self, handle):
        self._used(handle)
        if self.failure:
            raise RuntimeError(self.failure)
        members, size = self._of[handle]
        return len(members) == size

    def send(self, handle, tensor, peer, stream):
        self._operate(handle, "send", tensor)

    def receive(self, handle, tensor, peer, stream):
        self._operate(handle, "receive", tensor)

    def all_reduce(self, handle, tensor, stream):
        self._operate(handle, "all_reduce", tensor)
        if tensor.dtype not in self.missing:
            tensor.mul_(self._of[handle][1])  # as if all members had sent this tensor

    def reduce(self, handle, tensor, root, stream):
        self._operate(handle, "reduce", tensor)

    def broadcast(self, handle, tensor, root, stream):
        self._operate(handle, "broadcast", tensor)

    def abort(self, handle):
        with self._on_gpu("abort"):
            self._used(handle)
            self.aborted.append(handle)
            self.unfinished = False

    def _operate(self, handle, name, tensor):
        with self._on_gpu(name):
            if not self.ready(handle):
                raise RuntimeError("NCCL Error 7: operation in progress")
            if self._operating is not None:
                self.mistakes.append(f"{name} beside {self._operating}")
            self._operating = name
            time.sleep(0.0005)  # long enough for a call by another thread
            while handle in self.hanging and handle not in self.aborted:
                self.hangs.set()
                time.sleep(0.001)
            self._operating = None
            self.operations.append((name, tensor.numel()))

    @contextmanager
    def _on_gpu(self, name):
        if not getattr(self.on_gpu, "current", False):
            self.mistakes.append(f"{name} on another GPU")
        yield

    def _used(self, handle):
        if handle in self.aborted and handle not in self.hanging:
            self.mistakes.append("used after an abort")


class FakeStream:
    handle = 1

    def __init__(self, nccl):
        self._nccl = nccl

    @contextmanager
    def current(self):
        before, self._nccl.on_gpu.current = getattr(self._nccl.on_gpu, "current", False), True
        yield
        self._nccl.on_gpu.current = before

    def follow(self):
        return SimpleNamespace(query=lambda: not self._nccl.computing)

    def mark(self):
        return self

    def query(self):
        return not self._nccl.unfinished


def fake_library(monkeypatch):
    nccl = FakeLibrary()
    monkeypatch.setattr(group, "library", lambda: nccl)
    monkeypatch.setattr(group, "GpuStream", lambda device: FakeStream(nccl))
    return nccl
