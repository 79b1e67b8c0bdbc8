"""Runs in a zygote (see Zygote.preload): its jobs talk as they would by NCCL, over groups of Gloo.

What differs from Gloo's own way, as a job sees it: messages have no tags, a group has to be connected by both ends
before it is used, an operation is complete after an abort as well, a wait does not tell whether it is, and the GPU does
one thing after the other. The last is taken to the extreme: all groups of a worker share a single stream, and a message
holds up everything behind it until the other end has come to it.

RECYCLE_GPU_FAILURE='{"during": "receive", "after": 40, "once": "/tmp/flag"}': the GPU of the first worker that has
started so many receives fails; `during` is `receive` or `connect` (the next communicator it builds, and each one after
it). `once` is the file that this worker makes.
"""

import json
import os
import threading
from queue import SimpleQueue

import torch

from recycle_pp.comm.gloo.group import GlooGroup
from recycle_pp.comm.groups import GroupTransport
from recycle_pp.comm.nccl import group as nccl
from recycle_pp.comm.nccl.group import NcclGroup
from recycle_pp.execution import transports


class Stream:
    """Does one thing after the other; of one generation, as an abort ends whatever its GPU is at."""

    def __init__(self):
        self._todo = SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def add(self, start):
        work = Work()
        self._todo.put((start, work))
        return work

    def end(self):
        self._todo.put((None, None))

    def _run(self):
        while True:
            start, work = self._todo.get()
            if start is None:
                return
            try:
                start().wait()
            except RuntimeError as error:
                work.error = error.with_traceback(None)  # whose frames would keep the group alive
            work.done.set()
            del start, work


class Work:
    def __init__(self):
        self.done, self.error = threading.Event(), None

    def is_completed(self):
        return self.done.is_set()

    def wait(self):
        if self.error is not None:
            raise self.error


STREAMS = {}  # by generation


class Gpu:
    """The fake GPU of this process. Its failure is sticky, as a CUDA error is."""

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
    def __init__(self, gloo, stream):
        self._gloo, self._stream = gloo.gloo, stream
        self._sent, self._received = 0, 0

    def send(self, tensors, to, tag):
        """The tag is of no use to NCCL: what counts is the order."""
        self._sent += 1
        return self._stream.add(lambda number=self._sent: self._gloo.send(tensors, to, number))

    def recv(self, tensors, frm, tag):
        GPU.use("receive")
        self._received += 1
        return self._stream.add(lambda number=self._received: self._gloo.recv(tensors, frm, number))

    def allreduce(self, tensors):
        return self._stream.add(lambda: self._gloo.allreduce(tensors))

    def reduce(self, tensors, options):
        return self._stream.add(lambda: self._gloo.reduce(tensors, options))

    def broadcast(self, tensors, options):
        return self._stream.add(lambda: self._gloo.broadcast(tensors, options))


class LikeNccl:
    """In no cycle of references: Gloo's destructor may block, and must not run in whatever thread collects garbage."""

    def __init__(self, store, prefix, rank, size, device, timeout, interface):
        generation = prefix.partition("/")[0]
        if generation not in STREAMS:
            STREAMS[generation] = Stream()
        self._rank, self._gloo = rank, GlooGroup(store, prefix, rank, size, device, timeout, interface)
        self._stream = STREAMS[generation]
        self.backend = Backend(self._gloo, self._stream)

    def connect(self, pair):
        GPU.use("connect")
        self._gloo.connect()
        token = torch.zeros(1)
        if not pair:
            return [self.backend.allreduce([token])]
        ways = [self.backend.send, self.backend.recv]
        return [way([token], 1 - self._rank, 0) for way in (ways if self._rank == 0 else reversed(ways))]

    @staticmethod
    def wait(generation, work):
        NcclGroup.wait(generation, work)

    @staticmethod
    def abort(groups):
        GlooGroup.abort([group._gloo for group in groups])
        for stream in {group._stream for group in groups}:
            stream.end()


nccl.POLL_SECONDS = 1e-3  # many workers share a core
transports.TcpTransport = lambda store, *arguments: GroupTransport(store, torch.device("cpu"), 1800.0, LikeNccl)
