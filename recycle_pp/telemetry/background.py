"""Threads for work that an event loop must not wait for, such as writing to a slow disk or a paused terminal.

    records = Background("records")
    records(write, line)                   # queues the call; drops and counts it if the queue is full
    records.flush(5.0)                     # blocks until all calls are done (True), for at most 5 s (False)
    await records.flushed(5.0)             # the same in an event loop
    screen = BackgroundStream(sys.stdout)  # a stream whose `write` never blocks
    whole = await in_thread(newest_whole, folder)          # returns the function's value
    profile = await in_time(read_profile, path)            # None if that takes more than 2 s

The threads are daemons, so os._exit ends the process even if a file system never answers or a pager is paused.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TextIO, TypeVar

R = TypeVar("R")
Later = Callable[..., bool]
"""Calls a function with its arguments, now or later; returns False if it dropped the call"""
CAPACITY = 10_000  # limit on the calls in the queue
POLL_SECONDS = 0.005
READ_SECONDS = 2.0  # time limit for reading a file that a new coordinator can do without


def now(function: Callable[..., object], *arguments: Any) -> bool:
    """A `Later` that does not defer: calls the function immediately. For callers that are allowed to block."""
    function(*arguments)
    return True


class Background:
    """Runs calls in the order in which they were made, in one thread. Ignores exceptions that a call raises.

    delay: seconds that an idle thread waits before it runs a call, so that it does not compete with the caller for the
        interpreter
    """

    def __init__(self, name: str, capacity: int = CAPACITY, delay: float = 0.0) -> None:
        self._name = name
        self._delay = delay
        self._waiting: queue.Queue[Callable[[], object]] = queue.Queue(capacity)
        self._thread: threading.Thread | None = None
        self._made = self._done = 0
        self.dropped = 0  # number of calls for which the queue was full
        # Called in the thread before each call, which is skipped if this returns False. It may block.
        self.permitted: Callable[[], bool] = lambda: True

    def __call__(self, function: Callable[..., object], *arguments: Any) -> bool:
        """Queues a call; returns False if the queue is full."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        try:
            self._waiting.put_nowait(lambda: function(*arguments))
            self._made += 1
        except queue.Full:
            self.dropped += 1
            return False
        return True

    @property
    def idle(self) -> bool:
        return self._done == self._made

    def flush(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not self.idle and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return self.idle

    async def flushed(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not self.idle and time.monotonic() < deadline:
            await asyncio.sleep(POLL_SECONDS)
        return self.idle

    def _run(self) -> None:
        while True:
            was_idle = self._waiting.empty()
            call = self._waiting.get()
            if was_idle:
                time.sleep(self._delay)
            with suppress(Exception):
                if self.permitted():
                    call()
            self._done += 1


class BackgroundStream:
    """A text stream that writes to `stream` in a thread. If `stream` is not read and the queue is full, lines are
    dropped and counted."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._background = Background("screen")
        self._broken = False

    def write(self, text: str) -> None:
        """Queues the text. Raises BrokenPipeError after the reader has closed its end."""
        if self._broken:
            raise BrokenPipeError
        if self._background.dropped and self._background.idle:
            text = f"... {self._background.dropped} lines were dropped, because this output was not read\n{text}"
            self._background.dropped = 0
        self._background(self._write, text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return self._stream.isatty()

    async def flushed(self, seconds: float) -> bool:
        return await self._background.flushed(seconds)

    def _write(self, text: str) -> None:
        """Writes the text without Python's buffer, because a blocked write would hold the buffer's lock and prevent the
        exit."""
        try:
            descriptor = self._stream.fileno()
        except (OSError, ValueError):  # the stream is not a file, as in tests
            self._stream.write(text)
            return
        try:
            data = text.encode(errors="replace")
            while data:
                data = data[os.write(descriptor, data) :]
        except OSError:
            self._broken = True


async def in_thread(function: Callable[..., R], *arguments: Any) -> R:
    """Runs the function in a new thread and returns its value, or raises its exception."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[R] = loop.create_future()

    def set_result(value: R | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(value)  # type: ignore[arg-type]
        else:
            future.set_exception(error)

    def run() -> None:
        value, failed = None, None
        try:
            value = function(*arguments)
        except BaseException as error:
            failed = error
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(set_result, value, failed)

    threading.Thread(target=run, name=f"in_thread {getattr(function, '__name__', '')}", daemon=True).start()
    return await future


async def in_time(function: Callable[..., R], *arguments: Any) -> R | None:
    """Like `in_thread`, but returns None if the function takes longer than `READ_SECONDS` or the disk fails."""
    with suppress(OSError):  # includes TimeoutError
        return await asyncio.wait_for(in_thread(function, *arguments), READ_SECONDS)
    return None
