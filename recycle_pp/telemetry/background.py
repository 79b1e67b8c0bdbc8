"""Calls in a thread of their own, for an event loop that must not wait for a disk or for whoever reads standard output.

    records = Background("records")
    records(write, line)                   # never blocks: queued; where the queue is full it is dropped, and counted
    records.flush(5.0)                     # blocks until all is done, at most so long; False where it is not
    await records.flushed(5.0)             # the same in an event loop
    screen = BackgroundStream(sys.stdout)         # a stream whose `write` never blocks
    history = await in_thread(History.read, run)           # a function whose value is needed

The threads are daemons: a file system that never answers, or a pager that is paused, keeps no process alive, provided
that it leaves by os._exit.
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
"""What calls a function with its arguments, at some time; False if it never will"""
MOST = 10_000  # calls that wait
LOOK_SECONDS = 0.005


def now(function: Callable[..., object], *arguments: Any) -> bool:
    """For callers that may wait."""
    function(*arguments)
    return True


class Background:
    """Calls run in the order in which they were made. What one raises is lost: guard what must be told."""

    def __init__(self, name: str, most: int = MOST) -> None:
        self._name = name
        self._waiting: queue.Queue[Callable[[], object]] = queue.Queue(most)
        self._thread: threading.Thread | None = None
        self._made = self._done = 0
        self.dropped = 0  # since the last flush
        self.permitted: Callable[[], bool] = lambda: True  # asked in the thread before each call; it may block

    def __call__(self, function: Callable[..., object], *arguments: Any) -> bool:
        """False if the queue is full."""
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
            time.sleep(LOOK_SECONDS)
        return self.idle

    async def flushed(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not self.idle and time.monotonic() < deadline:
            await asyncio.sleep(LOOK_SECONDS)
        return self.idle

    def _run(self) -> None:
        while True:
            call = self._waiting.get()
            with suppress(Exception):
                if self.permitted():
                    call()
            self._done += 1


class BackgroundStream:
    """A text stream in the place of `stream`. Who writes never waits; what nobody reads is left out in the end."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._background = stream, Background("screen")
        self._broken = False

    def write(self, text: str) -> None:
        """OSError once nobody can read any more."""
        if self._broken:
            raise BrokenPipeError
        if self._background.dropped and self._background.idle:
            text, self._background.dropped = f"... {self._background.dropped} lines were not read\n{text}", 0
        self._background(self._write, text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return self._stream.isatty()

    async def flushed(self, seconds: float) -> bool:
        return await self._background.flushed(seconds)

    def _write(self, text: str) -> None:
        """Past Python's buffer, whose lock would be held while nobody reads: the process could not even end."""
        try:
            descriptor = self._stream.fileno()
        except (OSError, ValueError):  # no file at all, as in tests
            self._stream.write(text)
            return
        try:
            data = text.encode(errors="replace")
            while data:
                data = data[os.write(descriptor, data) :]
        except OSError:
            self._broken = True


async def in_thread(function: Callable[..., R], *arguments: Any) -> R:
    """The function's value, or what it raises, from a thread of its own."""
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
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(set_result, value, failed)

    threading.Thread(target=run, name=f"in_thread {getattr(function, '__name__', '')}", daemon=True).start()
    return await future
