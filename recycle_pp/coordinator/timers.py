"""Calls that come later, in the event loop: timers = Timers(); timers.after(0.3, explain, rank); timers.close()."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


class Timers:
    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()  # a task that nobody holds may be collected before it runs

    def after(self, seconds: float, function: Callable[..., None], *arguments: Any) -> None:
        async def wait() -> None:
            await asyncio.sleep(seconds)
            function(*arguments)

        task = asyncio.get_running_loop().create_task(wait())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """None of them comes any more."""
        for task in self._tasks:
            task.cancel()
