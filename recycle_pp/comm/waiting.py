"""Waits that end when their generation does, whatever becomes of the operation.

    generation = Generation(7)
    job = workers.start(work.wait)          # a thread of the pool blocks in C++
    generation.wait(job)                    # the caller blocks here; LinkBroken as soon as the generation is ended
    generation.end()                        # from any thread

An operation that blocks in C++ (Gloo's cannot be ended while the connection lives) does so in a thread of the pool,
which stays there; whoever waits for it goes on. That costs one hand-over between threads a wait, and no connection
between live workers has to be broken to wake one up.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar

from .device_errors import is_gpu_failure, is_out_of_memory

T = TypeVar("T")


class LinkBroken(RuntimeError):
    """An operation's generation is over: it was aborted, superseded, or a peer's connection broke.

    `aborted` is False when the error came from a socket first: then a peer has died, or has torn its group down because
    it learned of a death before us, or the network between us is broken; the coordinator wants to hear of it.
    """

    def __init__(self, generation: int, reason: str, *, aborted: bool = True):
        super().__init__(f"generation {generation}: {reason}")
        self.generation = generation
        self.aborted = aborted


class Job:
    """Something under way that one thread completes and others wait for: a function in a thread of the pool, or,
    without a function, what calls `finish`. error: what it ended with, None if well."""

    def __init__(self, function: Callable[[], object] | None = None):
        self.error: BaseException | None = None
        self._function: Callable[[], object] | None = function
        self._unfinished = threading.Lock()
        self._unfinished.acquire()

    def run(self) -> None:
        """Calls the function, in the calling thread, and lets go of what it holds. Once."""
        function, self._function = self._function, None
        assert function is not None
        try:
            function()
        except RuntimeError as error:
            self.finish(error.with_traceback(None))  # whose frames would keep Gloo's objects alive
        except BaseException as error:
            self.finish(error)
        else:
            self.finish()

    def finish(self, error: BaseException | None = None) -> None:
        """Completes it, once: every wait returns, and `error` is what became of it."""
        self.error = error
        self.release()

    def wait(self, seconds: float = -1) -> bool:
        """Blocks until `finish` or `release`; False if that takes longer than `seconds` (-1: any time). Any threads."""
        over = self._unfinished.acquire(timeout=seconds)
        if over:
            self.release()
        return over

    @property
    def over(self) -> bool:
        return not self._unfinished.locked()

    def release(self) -> None:
        with contextlib.suppress(RuntimeError):  # open already
            self._unfinished.release()


class Pool:
    """Starts functions in threads: a job never waits for another one. Idle threads are reused, two of them kept."""

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
            del job  # and with it the tensors of its function
            with self._lock:
                if len(self._idle) == self.KEPT:
                    self.threads -= 1
                    return
                self._idle.append(inbox)
            job = inbox.get()


class Generation:
    """The number of a generation and whether it has ended, shared by its operations. Any thread; holds no lock."""

    def __init__(self, number: int):
        self.number = number
        self.over = False
        self._awaited: set[Job] = set()

    def end(self) -> None:
        """Present waits return at once, and raise LinkBroken, as later ones do."""
        self.over = True
        for job in list(self._awaited):
            job.release()

    def check(self) -> None:
        if self.over:
            raise LinkBroken(self.number, "aborted")

    def wait(self, job: Job, seconds: float = -1) -> bool:
        """Blocks until the job is done; False if that takes longer than `seconds` (-1: any time). LinkBroken if the job
        failed, or as soon as the generation ends: that releases the job, which so must be nobody else's."""
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
        """Runs an operation of Gloo or NCCL here; LinkBroken if it fails, or if the generation has ended."""
        self.check()
        try:
            return operation()
        except RuntimeError as error:
            # Without its frames: they hold groups, and would keep them until some thread collects garbage and gets
            # stuck in the destructor of one.
            raise self.broken(error) from error.with_traceback(None)

    def broken(self, error: BaseException) -> BaseException:
        """The exception for a failed operation: LinkBroken, or `error` itself if the failure is this process's own."""
        if self.over:
            return LinkBroken(self.number, "aborted")
        own = is_gpu_failure(error) or is_out_of_memory(error) or isinstance(error, LinkBroken)
        if own or not isinstance(error, RuntimeError):
            return error
        return LinkBroken(self.number, str(error).partition("\n")[0], aborted=False)


class Pending:
    """An operation under way. Waiting for it twice is waiting once; one thread waits."""

    __slots__ = ("_finish", "arrived")

    def __init__(self, finish: Callable[[], object] | None, arrived: Callable[[], bool] = lambda: False):
        """arrived: whether waiting for it would end at once, as far as is known; for any thread."""
        self._finish, self.arrived = finish, arrived

    def wait(self) -> None:
        """Blocks until done. LinkBroken when the generation ends first, or when a peer's connection breaks."""
        if self._finish is not None:
            self._finish()
            self._finish = None
