"""Waits that end together with their generation, even if the operation does not.

    generation = Generation(7)
    job = workers.start(work.wait)          # a thread of the pool blocks in C++
    generation.wait(job)                    # the caller blocks here; LinkBroken as soon as the generation has ended
    generation.end()                        # from any thread

An operation that blocks in C++ runs in a thread of the pool, because a blocked operation of Gloo cannot be ended
without breaking its connection. That thread stays blocked, while its waiter continues. This costs one switch between
threads per wait, and avoids breaking connections between live workers.
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
    """The generation of an operation is over: it was aborted or superseded, or a peer's connection broke.

    `aborted` is False if a socket reported the error first. Then a peer died, or tore down its group because it learned
    of a death earlier, or the network is broken. The coordinator must be informed.
    """

    def __init__(self, generation: int, reason: str, *, aborted: bool = True):
        super().__init__(f"generation {generation}: {reason}")
        self.generation = generation
        self.aborted = aborted


class Job:
    """A pending operation that one thread completes and others wait for: a function in a thread of the pool, or without
    a function, until a call of `finish`. error: its exception, or None."""

    def __init__(self, function: Callable[[], object] | None = None):
        self.error: BaseException | None = None
        self._function: Callable[[], object] | None = function
        self._unfinished = threading.Lock()
        self._unfinished.acquire()

    def run(self) -> None:
        """Calls the function in the calling thread, and drops it. Once."""
        function, self._function = self._function, None
        assert function is not None
        try:
            function()
        except RuntimeError as error:
            self.finish(error.with_traceback(None))  # without its frames, which would keep Gloo's objects alive
        except BaseException as error:
            self.finish(error)
        else:
            self.finish()

    def finish(self, error: BaseException | None = None) -> None:
        """Completes the job, once: all waits return. error: its exception, or None."""
        self.error = error
        self.release()

    def wait(self, seconds: float = -1) -> bool:
        """Blocks until `finish` or `release`. False if that takes longer than `seconds` (-1: no limit). Any threads."""
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
    """Runs functions in threads. A job never waits for another one. Keeps up to two idle threads for reuse."""

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
        """Ends the generation: current and later waits raise LinkBroken at once."""
        self.over = True
        for job in list(self._awaited):
            job.release()

    def check(self) -> None:
        if self.over:
            raise LinkBroken(self.number, "aborted")

    def wait(self, job: Job, seconds: float = -1) -> bool:
        """Blocks until the job is done. False if that takes longer than `seconds` (-1: no limit).

        LinkBroken if the job failed, or as soon as the generation ends. The end releases the job, so no other
        generation may wait for the same job."""
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
        """Runs an operation of Gloo or NCCL. LinkBroken if it fails, or if the generation has ended."""
        self.check()
        try:
            return operation()
        except RuntimeError as error:
            # Without frames, which would keep groups alive until some thread collects garbage and blocks in a group's
            # destructor.
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
    """A pending operation. It may be waited for repeatedly, by one thread."""

    __slots__ = ("_finish", "arrived")

    def __init__(self, finish: Callable[[], object] | None, arrived: Callable[[], bool] = lambda: False):
        """arrived: whether a wait would return at once, as far as known; for any thread."""
        self._finish, self.arrived = finish, arrived

    def wait(self) -> None:
        """Blocks until done. LinkBroken if the generation ends first, or if a peer's connection breaks."""
        if self._finish is not None:
            self._finish()
            self._finish = None
