"""Waits that end when their generation ends, even if the operation is still blocked.

    generation = Generation(7)
    job = pool.start(work.wait)             # a thread of the pool blocks in C++
    generation.wait(job)                    # blocks the caller; raises LinkBroken as soon as the generation ends
    generation.end()                        # from any thread

A blocked Gloo operation ends only if its connection is broken. It therefore runs in a thread of the pool, which may
stay blocked while the waiting thread continues. Each wait costs one thread switch, but connections between live workers
stay up.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar

from recycle_schedules import Worker

from recycle_pp.wire.messages.members import Assignment, Member

from .device_errors import is_gpu_failure, is_out_of_memory

T = TypeVar("T")


class LinkBroken(RuntimeError):
    """The generation of an operation is over, because it was aborted or superseded or a peer's connection broke.

    `aborted` is False if a socket error occurred before this process received an abort. In that case a peer has died, a
    peer has already closed its group after another death, or the network is cut. The coordinator must be notified.
    """

    def __init__(self, generation: int, reason: str, *, aborted: bool = True):
        super().__init__(f"generation {generation}: {reason}")
        self.generation = generation
        self.aborted = aborted


class Job:
    """A pending operation that one thread completes while others wait for it.

    A job with a function is complete when a thread of the pool has run the function. Other jobs are complete when
    `finish` is called.

    done: whether the job is complete. `release` alone ends all waits (`over`) without completing the job.
    error: the exception with which the operation failed, or None"""

    def __init__(self, function: Callable[[], object] | None = None):
        self.done = False
        self.error: BaseException | None = None
        self._function: Callable[[], object] | None = function
        self._unfinished = threading.Lock()
        self._unfinished.acquire()

    def run(self) -> None:
        """Calls the function in this thread and then drops it. May be called only once."""
        function, self._function = self._function, None
        assert function is not None
        try:
            function()
        except RuntimeError as error:
            self.finish(error.with_traceback(None))  # the traceback's frames would keep Gloo's objects alive
        except BaseException as error:
            self.finish(error)
        else:
            self.finish()

    def finish(self, error: BaseException | None = None) -> None:
        """Completes the job and wakes all waiting threads. error: the exception of a failed operation, or None."""
        self.error, self.done = error, True
        self.release()

    def wait(self, seconds: float = -1) -> bool:
        """Blocks until `finish` or `release` is called, at most `seconds` (-1: no limit). Several threads may wait.

        Returns True if one of them was called, False after a timeout."""
        over = self._unfinished.acquire(timeout=seconds)
        if over:
            self.release()
        return over

    @property
    def over(self) -> bool:
        return not self._unfinished.locked()

    def release(self) -> None:
        with contextlib.suppress(RuntimeError):  # already released
            self._unfinished.release()


class Pool:
    """Runs each function immediately in a thread of its own, without waiting for other jobs. Keeps up to two idle
    threads for reuse."""

    KEPT = 2

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[SimpleQueue[Job]] = []
        self.threads = 0

    def start(self, function: Callable[[], object]) -> Job:
        job = Job(function)
        with self._lock:
            inbox = self._idle.pop() if self._idle else None
            self.threads += inbox is None
        if inbox is None:
            threading.Thread(target=self._work, args=(job,), name="recycle-wait", daemon=True).start()
        else:
            inbox.put(job)
        return job

    def _work(self, job: Job) -> None:
        inbox: SimpleQueue[Job] = SimpleQueue()
        while True:
            job.run()
            del job  # also frees the tensors of its function
            with self._lock:
                if len(self._idle) == self.KEPT:
                    self.threads -= 1
                    return
                self._idle.append(inbox)
            job = inbox.get()


class Generation:
    """A generation's number, its members, and whether it has ended. All its operations share this object.

    Methods may be called from any thread and hold no lock."""

    def __init__(self, number: int, members: Assignment | None = None):
        self.number = number
        self.members = members or {}
        self._players = {worker: member for member, worker in self.members.items()}
        self.over = False
        self._awaited: set[Job] = set()

    def end(self) -> None:
        """Ends the generation, so that current and later waits raise LinkBroken at once."""
        self.over = True
        for job in list(self._awaited):
            job.release()

    def check(self) -> None:
        if self.over:
            raise LinkBroken(self.number, "aborted")

    def member(self, worker: Worker) -> Member:
        """The member (process) that runs as this worker."""
        return self._players[worker]

    def wait(self, job: Job, seconds: float = -1) -> bool:
        """Blocks until the job is done, at most `seconds` (-1: no limit). Returns whether it is done.

        Raises LinkBroken if the job fails, or as soon as the generation ends. The end of the generation releases the
        job, so another generation must not wait for it."""
        self._awaited.add(job)
        done = self.over or job.wait(seconds)
        self._awaited.discard(job)
        self.check()
        if done and job.error is not None:
            raise self.broken(job.error) from job.error
        return done

    def pending(self, job: Job) -> Pending:
        return Pending(lambda: self.wait(job), lambda: self.over or job.over)

    def attempt(self, operation: Callable[[], T]) -> T:
        """Runs a Gloo or NCCL operation. Raises LinkBroken if it fails, or if the generation has ended."""
        self.check()
        try:
            return operation()
        except RuntimeError as error:
            # Drops the traceback. Its frames would keep groups alive until a thread collects garbage, and that thread
            # would then block in the destructor of a group.
            raise self.broken(error) from error.with_traceback(None)

    def broken(self, error: BaseException) -> BaseException:
        """The exception to raise for a failed operation. This is LinkBroken, or `error` itself if a GPU failure or full
        memory caused it."""
        if self.over:
            return LinkBroken(self.number, "aborted")
        own = is_gpu_failure(error) or is_out_of_memory(error) or isinstance(error, LinkBroken)
        if own or not isinstance(error, RuntimeError):
            return error
        return LinkBroken(self.number, str(error).partition("\n")[0], aborted=False)


class Pending:
    """A pending operation. One thread may wait for it, any number of times."""

    __slots__ = ("_finish", "arrived", "lacks")

    def __init__(
        self,
        finish: Callable[[], object] | None,
        arrived: Callable[[], bool] = lambda: False,
        lacks: Callable[[], list[Member]] = list,
    ):
        """
        finish   blocks until the operation is done; None if it is already done
        arrived  whether `wait` is known to return at once; may be called from any thread
        lacks    members whose messages have not arrived, if that is known; may be called from any thread
        """
        self._finish, self.arrived, self.lacks = finish, arrived, lacks

    def wait(self) -> None:
        """Blocks until the operation is done.

        Raises LinkBroken if the generation ends first or a peer's connection breaks."""
        if self._finish is not None:
            self._finish()
            self._finish = None
