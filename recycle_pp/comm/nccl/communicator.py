"""An NCCL communicator that several threads can use and any thread can abort.

    communicator = Communicator(library(), GpuStream(device), rank, size)
    communicator.open(identity)                     # returns at once; `ready` is true when all members have joined
    work = communicator.send([tensor], peer, 0)     # no tags: messages match in the order of both sides' calls
    work.is_completed()
    communicator.abort()

NCCL does not allow parallel calls from several threads, even for different communicators of one GPU, so all operations
of a process take one lock. An abort does not take this lock. It only waits for calls inside its own communicator, which
return at once unless they hang in the driver.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from .gpu_stream import GpuStream
from .library import Library

ENTER_SECONDS = 1.0  # a longer call is assumed to hang in the driver until the abort ends the running kernels
DONE_SECONDS = 0.001  # seconds between two polls of kernels that an abort ends

_operations = threading.Lock()  # held by each operation of this process, which uses one GPU


class Aborted(RuntimeError):
    """The communicator was aborted before the call."""


class Communicator:
    """One NCCL communicator on one stream.

    Operations take a list with one tensor, as in torch's back ends. The tensor is kept until the GPU has finished the
    operation, even if the caller drops the `Work`."""

    def __init__(self, nccl: Library, stream: GpuStream, rank: int, size: int):
        self._nccl, self._stream = nccl, stream
        self._rank, self._size = rank, size
        self._handle = 0
        self._ended = False
        self._inside = threading.Lock()  # held by a call that uses the handle
        self._started: deque[Work] = deque()
        self._launching: Tensor | None = None
        self._followed: Any = None  # event: the GPU has done all work for which the latest operation waits

    def open(self, identity: bytes) -> None:
        with _operations, self._stream.current(), self._entered():
            self._handle = self._nccl.open(self._size, identity, self._rank)

    def ready(self) -> bool:
        """Whether an operation may be called. Raises RuntimeError if the communicator has failed."""
        with self._entered():
            return self._nccl.ready(self._handle)

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Work:
        return self._start(tensors, lambda handle, tensor, stream: self._nccl.send(handle, tensor, to, stream))

    def recv(self, tensors: list[Tensor], frm: int, tag: int) -> Work:
        return self._start(tensors, lambda handle, tensor, stream: self._nccl.receive(handle, tensor, frm, stream))

    def allreduce(self, tensors: list[Tensor]) -> Work:
        return self._start(tensors, self._nccl.all_reduce)

    def reduce(self, tensors: list[Tensor], options: Any) -> Work:
        root = options.rootRank
        return self._start(tensors, lambda handle, tensor, stream: self._nccl.reduce(handle, tensor, root, stream))

    def broadcast(self, tensors: list[Tensor], options: Any) -> Work:
        root = options.rootRank
        return self._start(tensors, lambda handle, tensor, stream: self._nccl.broadcast(handle, tensor, root, stream))

    @property
    def is_due(self) -> bool:
        """Whether the operations no longer wait for compute, so that an abort ends them at once."""
        return self._followed is None or bool(self._followed.query())

    def abort(self) -> None:
        """Blocks until the GPU no longer runs this communicator's operations. Call it once, from any thread."""
        self._ended = True  # rejects later calls
        if self._inside.acquire(timeout=ENTER_SECONDS):
            self._inside.release()
        if self._handle:
            with self._stream.current():
                self._nccl.abort(self._handle)
                left = self._stream.mark()
            while not left.query():
                time.sleep(DONE_SECONDS)
        self._started.clear()

    def _start(self, tensors: list[Tensor], operation: Callable[[int, Tensor, int], None]) -> Work:
        (tensor,) = tensors
        with _operations, self._stream.current():
            with self._entered():
                self._launching = tensor
                self._followed = self._stream.follow()
                operation(self._handle, tensor, self._stream.handle)
            # Waits until NCCL has launched the operation in its own thread. NCCL connects at the first use.
            while True:
                with self._entered():
                    if self._nccl.ready(self._handle):
                        return self._keep(Work(self, self._stream.mark(), tensor))
                time.sleep(0)

    def _keep(self, work: Work) -> Work:
        while self._started and self._started[0].event.query():
            self._started.popleft()
        self._started.append(work)
        return work

    @contextmanager
    def _entered(self) -> Iterator[None]:
        with self._inside:
            if self._ended:
                raise Aborted("the communicator was aborted")
            yield


class Work:
    """An operation on the GPU."""

    def __init__(self, communicator: Communicator, event: Any, tensor: Tensor):
        self.event = event
        self._communicator, self._tensor = communicator, tensor

    def is_completed(self) -> bool:
        """Whether the GPU has finished the operation or an abort has ended it.

        Raises RuntimeError if the communicator has failed."""
        if self.event.query():
            return True
        self._communicator.ready()
        return False

    def wait(self) -> None:
        """Does nothing, because the caller has already waited for `is_completed`."""
