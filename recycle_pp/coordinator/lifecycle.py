"""Ends the job, exactly once.

lifecycle = Lifecycle(roster, recorder)
lifecycle.stop("reason", code=2)      # or finish(digests, code), or end(code) without a record
await lifecycle.guard(work, rank)     # awaits work(rank); an exception stops the job
code = await lifecycle.ended()
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from recycle_schedules import Worker

from recycle_pp.consensus.agreement import Deposed
from recycle_pp.telemetry.recorder import Recorder
from recycle_pp.wire.messages.supervisors import Death

from .roster import Roster


class Lifecycle:
    def __init__(self, roster: Roster, recorder: Recorder) -> None:
        self._roster = roster
        self._recorder = recorder
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
        """Ends the job with a reason and an exit code. Only the first call counts, because later
        reasons are consequences of the first."""
        if not self.over:
            self._record_deaths()
            self._recorder.stopped(reason)
            self.reason = reason
            self.end(code)

    def failed(self, part: str = "the coordinator") -> None:
        """Stops the job with the traceback of the current exception."""
        self.stop(f"{part} failed:\n{traceback.format_exc()}")

    async def guard(self, work: Callable[..., Awaitable[None]], *arguments: Any, part: str = "the coordinator") -> None:
        """Awaits work(*arguments). An exception stops the job with its traceback. Otherwise asyncio might drop the
        exception, or it might look like the death of a client. If the lease is lost (Deposed), only the work ends."""
        try:
            await work(*arguments)
        except Deposed:
            pass
        except Exception:
            self.failed(part)

    def finish(self, digests: Mapping[Worker, Mapping[str, str]], code: int) -> None:
        """Ends the job after the last step. digests: worker -> digests of its parameters."""
        if not self.over:
            self._record_deaths()
            self._recorder.finished(digests)
            self.end(code)

    def end(self, code: int) -> None:
        self._code = code if self._code is None else self._code
        self._over.set()

    async def ended(self) -> int:
        """Waits until the job is over. Returns the exit code."""
        await self._over.wait()
        assert self._code is not None
        return self._code

    def _record_deaths(self) -> None:
        """Writes the events of deaths whose cause is still unknown, so that the end of the job is the last event."""
        for rank in self._roster:
            if rank.explained < rank.died:
                rank.explained = rank.died
                unknown = Death("unknown", "the job ended before the cause was known")
                self._recorder.explain_death((rank.number, rank.died), rank.causes.get(rank.died, unknown))
        self._recorder.release()
