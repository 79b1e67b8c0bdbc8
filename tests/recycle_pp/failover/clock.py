"""A deterministic event loop in virtual time that runs several simulated processes; each can be paused and killed.

    loop = VirtualLoop()
    with loop.process("a"):                    # tasks created here, and all tasks that they create, belong to "a"
        loop.create_task(main())
    loop.run(until=60.0)                       # virtual seconds
    loop.pause("a", 1.5); loop.kill("a")

Sleeps, timeouts, events and futures of asyncio work as usual; only sleeping takes virtual time. Callbacks of a paused
process run after the pause, in their order, as after SIGSTOP and SIGCONT.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from typing import Any

PROCESS: ContextVar[str | None] = ContextVar("process", default=None)


class VirtualLoop(asyncio.AbstractEventLoop):
    """errors: unhandled exceptions of tasks and callbacks."""

    def __init__(self) -> None:
        self.errors: list[BaseException | str] = []
        self.before_each = lambda process: None  # called before each callback of a process
        self._now = 0.0
        self._due: list[tuple[float, int, asyncio.Handle]] = []
        self._order = itertools.count()
        self._paused: dict[str | None, float] = {}
        self._dead: set[str | None] = set()
        self._tasks: set[asyncio.Task[Any]] = set()  # prevents the collection of tasks that wait for each other

    @contextmanager
    def process(self, name: str) -> Iterator[None]:
        token = PROCESS.set(name)
        try:
            yield
        finally:
            PROCESS.reset(token)

    def run(self, until: float) -> None:
        """Runs every callback that is due by then."""
        asyncio._set_running_loop(self)
        try:
            while self._due and self._due[0][0] <= until:
                when, order, handle = heapq.heappop(self._due)
                self._now = max(self._now, when)
                process = handle._context.get(PROCESS)  # type: ignore[attr-defined]
                if handle.cancelled() or process in self._dead:
                    continue
                self.before_each(process)
                if (later := self._paused.get(process, 0.0)) > self._now:
                    heapq.heappush(self._due, (later, order, handle))
                    continue
                handle._run()
            self._now = until
        finally:
            asyncio._set_running_loop(None)

    def pause(self, process: str, seconds: float) -> None:
        self._paused[process] = max(self._paused.get(process, 0.0), self._now + seconds)

    def close(self) -> None:
        """Closes the remaining coroutines one by one.

        If the garbage collector closed them during a later simulation, one simulation in about ten thousand would crash
        CPython 3.11.7 (a segmentation fault in a finaliser).
        """
        asyncio._set_running_loop(self)
        try:
            while self._tasks:
                task = self._tasks.pop()
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                with suppress(RuntimeError):  # the coroutine awaits something in its cleanup
                    task.get_coro().close()  # type: ignore[union-attr]
        finally:
            asyncio._set_running_loop(None)
        self._due.clear()

    def kill(self, process: str) -> None:
        self._dead.add(process)

    # -- asyncio's interface -----------------------------------------------------------------------------------

    def time(self) -> float:
        return self._now

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        return self.call_at(self._now, callback, *args, context=context)

    call_soon_threadsafe = call_soon

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context or copy_context())
        heapq.heappush(self._due, (when, next(self._order), handle))
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: str | None = None, context: Any = None) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard, context=copy_context())
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.errors.append(context.get("exception") or context["message"])

    def add_signal_handler(self, sig: int, callback: Any, *args: Any) -> None:
        """Does nothing, as no signals are sent."""

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass
