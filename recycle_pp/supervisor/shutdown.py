"""A signal to this rank: the coordinator is told, and says what follows; how long the rank waits for each.

    shutdown = Shutdown(say)                       # say(Stopping(...)): to the coordinator, where there is one
    shutdown.listen()                              # to SIGINT and SIGTERM
    await asyncio.wait({serving, shutdown.signal})
    await shutdown.answered(serving)               # EndsSoon: the job saves and ends; Evict: only this node leaves
    await shutdown.saved(serving)                  # the job has ended, or the user does not want to wait
    shutdown.close()                               # no signal is heard any more

`serving` is the conversation with the coordinator, which ends with the job. All of it runs in the event loop.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any

from recycle_pp.wire.messages.supervisors import EndsSoon, Evict, Stopping

LEAVE_SECONDS = 20.0  # for a worker to hand over before its machine is taken; torchrun grants 30
ASK_SECONDS = 3.0  # for the coordinator to say what follows
SAVE_SECONDS = 24.0  # for the job to finish its step and save; torchrun grants 30
TOGETHER_SECONDS = 2.0  # within which signals count as one: a Ctrl-C comes from the terminal, and again from torchrun


class Shutdown:
    """signal: the number of the first one, once it has come. told: what the coordinator was told of it."""

    def __init__(self, say: Callable[[Stopping], None]) -> None:
        loop = asyncio.get_running_loop()
        self.signal: asyncio.Future[int] = loop.create_future()
        self.told: Stopping | None = None
        self._say, self._at = say, 0.0
        self._again: asyncio.Future[None] = loop.create_future()  # a later one: the user does not want to wait
        self._answer: asyncio.Future[EndsSoon | Evict] = loop.create_future()

    def listen(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._heard, number)

    def answer(self, message: EndsSoon | Evict) -> None:
        """The coordinator's, to a signal here or elsewhere."""
        if not self._answer.done():
            self._answer.set_result(message)

    async def answered(self, serving: asyncio.Task[int]) -> bool:
        """Whether the coordinator has answered and the job goes on until then; waits `ASK_SECONDS` at most."""
        await _first(serving, self._answer, seconds=ASK_SECONDS)
        return self._answer.done() and not serving.done()

    async def saved(self, serving: asyncio.Task[int]) -> None:
        """Returns when the job has ended, `ASK_SECONDS` after a second signal, or after `SAVE_SECONDS`."""
        await _first(serving, self._again, seconds=SAVE_SECONDS)
        if not serving.done():
            await _first(serving, seconds=ASK_SECONDS)

    async def left(self, serving: asyncio.Task[int]) -> None:
        """Returns when the job has ended, or when this node's machine is about to be taken."""
        await _first(serving, seconds=max(0.0, self._at + LEAVE_SECONDS - asyncio.get_running_loop().time()))

    def tell(self) -> None:
        """The coordinator, of the first signal."""
        self.told = Stopping(signal.Signals(self.signal.result()).name)
        self._say(self.told)

    def tell_again(self) -> None:
        """The coordinator that was told is lost, and this is the next one."""
        if self.told is not None:
            self._say(self.told)

    @staticmethod
    def close() -> None:
        """The process ends anyway, and asyncio prints an error for each one that comes while its loop closes."""
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)

    def _heard(self, number: int) -> None:
        now = asyncio.get_running_loop().time()
        if not self.signal.done():
            self._at = now
            self.signal.set_result(number)
        elif now > self._at + TOGETHER_SECONDS and not self._again.done():
            self._again.set_result(None)
            self._say(Stopping(signal.Signals(number).name, again=True))


async def _first(*awaited: asyncio.Future[Any], seconds: float) -> None:
    await asyncio.wait(awaited, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
