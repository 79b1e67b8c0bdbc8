"""Makes the jobs of a zygote (see Zygote.preload) communicate over Gloo groups that behave like NCCL.

Differences from Gloo that a job can notice:

- messages have no tags
- both ends of a group have to connect before its first use
- an abort completes operations, and a wait does not show whether it was an abort
- the GPU runs operations one at a time: all groups of a worker share one stream, so a message delays all operations
  after it until the peer has posted its own

RECYCLE_GPU_FAILURE='{"during": "receive", "after": 40, "once": "/tmp/flag"}' makes the GPU of one worker fail.

during  `receive`, or `connect` (while the worker builds communicators)
after   number of receives by a worker before its GPU may fail
once    a file that the first such worker creates, so that no other GPU fails
"""

import json
import os
import threading
from functools import cache
from queue import SimpleQueue

import torch

from recycle_pp.comm.gloo.group import GlooGroup
from recycle_pp.comm.groups import GroupTransport
from recycle_pp.comm.nccl import group as nccl
from recycle_pp.comm.nccl.group import NcclGroup
from recycle_pp.execution import transports


class Stream:
    """Runs the operations of all groups one at a time. `abort` ends the operations of the given groups."""

    def __init__(self):
        self._todo, self._lock, self._running = SimpleQueue(), threading.Lock(), (None, None)
        threading.Thread(target=self._run, daemon=True).start()

    def add(self, backend, start):
        work = Work()
        self._todo.put((backend, start, work))
        return work

    def abort(self, backends):
        with self._lock:
            for backend in backends:
                backend.aborted = True
            running, job = self._running
        if running in backends:
            job.release()

    def _run(self):
        while True:
            backend, start, work = self._todo.get()
            try:
                if not backend.aborted:
                    job = start()
                    with self._lock:
                        self._running = backend, job
                        if backend.aborted:
                            job.release()
                    job.wait()
                    work.error = job.error
            except RuntimeError as error:
                work.error = error.with_traceback(None)  # the frames of the traceback would keep the group alive
            work.done.set()
            self._running = None, None
            backend = start = work = job = None


class Work:
    def __init__(self):
        self.done, self.error = threading.Event(), None

    def is_completed(self):
        if self.error is not None:
            raise self.error
        return self.done.is_set()

    def wait(self):
        pass


@cache
def stream():
    """The only stream of this process. Created after the fork, because it starts a thread."""
    return Stream()


class Gpu:
    """The fake GPU of this process. Its failure is sticky, like a CUDA error."""

    def __init__(self):
        self._failed, self._receives = False, 0

    def use(self, during):
        plan = json.loads(os.environ.get("RECYCLE_GPU_FAILURE", "null"))
        if plan is None:
            return
        self._receives += during == "receive"
        if not self._failed and self._receives >= plan["after"] and during == plan["during"]:
            try:
                os.close(os.open(plan["once"], os.O_CREAT | os.O_EXCL))
                self._failed = True
            except FileExistsError:
                pass
        if self._failed:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


GPU = Gpu()


class Backend:
    def __init__(self, gloo):
        self._gloo, self.aborted = gloo.backend, False
        self._sent, self._received = 0, 0

    def send(self, tensors, to, tag):
        """Numbers the messages, because NCCL ignores tags and uses the order."""
        self._sent += 1
        return stream().add(self, lambda number=self._sent: self._gloo.send(tensors, to, number))

    def recv(self, tensors, frm, tag):
        GPU.use("receive")
        self._received += 1
        return stream().add(self, lambda number=self._received: self._gloo.recv(tensors, frm, number))

    def allreduce(self, tensors):
        return stream().add(self, lambda: self._gloo.allreduce(tensors))

    def reduce(self, tensors, options):
        return stream().add(self, lambda: self._gloo.reduce(tensors, options))

    def broadcast(self, tensors, options):
        return stream().add(self, lambda: self._gloo.broadcast(tensors, options))


class LikeNccl:
    """Avoids reference cycles. Gloo's destructor may block, so the garbage collector must never run it."""

    def __init__(self, store, prefix, rank, size, device, timeout, interface):
        self._rank, self._gloo = rank, GlooGroup(store, prefix, rank, size, device, timeout, interface)
        self.backend = Backend(self._gloo)

    def connect(self, generation, pair):
        GPU.use("connect")
        self._gloo.connect(generation)
        token = torch.zeros(1)
        ways = [self.backend.send, self.backend.recv]
        order = ways if self._rank == 0 else reversed(ways)
        for work in [way([token], 1 - self._rank, 0) for way in order] if pair else [self.backend.allreduce([token])]:
            NcclGroup.wait(generation, work)

    @staticmethod
    def wait(generation, work):
        NcclGroup.wait(generation, work)

    @staticmethod
    def abort(groups):
        GlooGroup.abort([group._gloo for group in groups])
        stream().abort([group.backend for group in groups])


nccl.POLL_SECONDS = 1e-3  # many workers share a core
transports.TcpTransport = lambda store, *arguments: GroupTransport(store, torch.device("cpu"), 1800.0, LikeNccl)
