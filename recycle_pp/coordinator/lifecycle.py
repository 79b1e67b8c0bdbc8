"""The end of the job, which happens once.

lifecycle = Lifecycle(recorder, closing)
lifecycle.stop("reason", code=2)      # or finish(digests, code), or end(code) without a record
code = await lifecycle.ended()
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from recycle_schedules import Worker

from recycle_pp.telemetry.recorder import Recorder


class Lifecycle:
    """closing(): called before the last event, so that waiting events are written first."""

    def __init__(self, recorder: Recorder, closing: Callable[[], None]) -> None:
        self._recorder = recorder
        self._closing = closing
        self._code: int | None = None
        self.reason = ""  # why the job stopped
        self._over = asyncio.Event()

    @property
    def code(self) -> int | None:
        """The exit code of the job; None while it runs."""
        return self._code

    @property
    def over(self) -> bool:
        return self._code is not None

    def stop(self, reason: str, code: int = 1) -> None:
        """Ends the job with this reason and exit code. Later calls have no effect, because they are consequences of the
        first one."""
        if not self.over:
            self._closing()
            self._recorder.stopped(reason)
            self.reason = reason
            self.end(code)

    def finish(self, digests: Mapping[Worker, Mapping[str, str]], code: int) -> None:
        """Ends the job after the last step. digests: worker -> digests of its parameters."""
        if not self.over:
            self._closing()
            self._recorder.finished(digests)
            self.end(code)

    def end(self, code: int) -> None:
        self._code = code if self._code is None else self._code
        self._over.set()

    async def ended(self) -> int:
        """The exit code; blocks until the job is over."""
        await self._over.wait()
        assert self._code is not None
        return self._code
