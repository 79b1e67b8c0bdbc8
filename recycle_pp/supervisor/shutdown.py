"""Handles SIGINT, SIGTERM and SIGHUP to this rank: reports the signal to the coordinator and waits for its decision.

    shutdown = Shutdown(send)                      # send(Stopping(...)): to the coordinator, if connected
    shutdown.listen()                              # catches the signals
    await asyncio.wait({serving, shutdown.signal})
    shutdown.report()
    await shutdown.wait_for_answer(serving)        # EndsSoon: the job saves and ends; Evict: only this node leaves
    await shutdown.wait_for_save(serving)          # until the job has ended, or a second signal
    shutdown.close()                               # ignores further signals

`serving` is the task that serves the coordinator; it ends with the job. Call everything in the event loop's thread.

SIGHUP, which a terminal sends when it is closed, counts as SIGTERM. `nohup` makes a process ignore it.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any

from recycle_pp.wire.messages.supervisors import EndsSoon, Evict, Stopping

LEAVE_SECONDS = 20.0  # time for a worker to hand over before its machine is taken away; torchrun allows 30
ASK_SECONDS = 3.0  # time for the coordinator to answer
SAVE_SECONDS = 24.0  # time for the job to finish its step and save; torchrun allows 30
TOGETHER_SECONDS = 2.0  # signals this close count as one, because torchrun repeats the terminal's Ctrl-C


class Shutdown:
    """This rank's reaction to signals.

    signal    future of the number of the first signal
    reported  the message to the coordinator about this signal; None before it is sent
    lost      whether a coordinator has been lost. Its successor answers only when it has taken over
    """

    def __init__(self, send: Callable[[Stopping], None]) -> None:
        loop = asyncio.get_running_loop()
        self.signal: asyncio.Future[int] = loop.create_future()
        self.reported: Stopping | None = None
        self.lost = False
        self._send = send
        self._at = 0.0
        self._second: asyncio.Future[None] = loop.create_future()  # done at a second signal, which ends the wait early
        self._answer: asyncio.Future[EndsSoon | Evict] = loop.create_future()

    def listen(self) -> None:
        for number, as_if in _signals().items():
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, as_if)

    def answer(self, message: EndsSoon | Evict) -> None:
        """Accepts the coordinator's answer to a signal at this rank or at another one."""
        if not self._answer.done():
            self._answer.set_result(message)

    async def wait_for_answer(self, serving: asyncio.Task[int]) -> bool:
        """Waits for the coordinator's answer or the end of the job, at most `ASK_SECONDS`, or `LEAVE_SECONDS` if the
        coordinator has changed. Returns whether the answer has arrived and the job still runs."""
        await _first(serving, self._answer, seconds=ASK_SECONDS)
        if self.lost:
            await _first(serving, self._answer, seconds=LEAVE_SECONDS - ASK_SECONDS)
        return self._answer.done() and not serving.done()

    async def wait_for_save(self, serving: asyncio.Task[int]) -> None:
        """Waits until the job has ended. After `SAVE_SECONDS` or a second signal, waits for at most another
        `ASK_SECONDS`."""
        await _first(serving, self._second, seconds=SAVE_SECONDS)
        if not serving.done():
            await _first(serving, seconds=ASK_SECONDS)

    async def wait_for_end(self, serving: asyncio.Task[int]) -> None:
        """Waits until the job has ended, but at most until shortly before this node's machine is taken away."""
        await _first(serving, seconds=max(0.0, self._at + LEAVE_SECONDS - asyncio.get_running_loop().time()))

    def report(self) -> None:
        """Reports the first signal to the coordinator."""
        self.reported = Stopping(signal.Signals(self.signal.result()).name)
        self._send(self.reported)

    def repeat_report(self) -> None:
        """Repeats the report to a new coordinator, if there was a signal."""
        if self.reported is not None:
            self._send(self.reported)

    @staticmethod
    def close() -> None:
        """Ignores signals from now on. Otherwise asyncio would print an error for each signal while its loop closes."""
        for number in _signals():
            asyncio.get_running_loop().remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)

    def _on_signal(self, number: int) -> None:
        now = asyncio.get_running_loop().time()
        if not self.signal.done():
            self._at = now
            self.signal.set_result(number)
        elif now > self._at + TOGETHER_SECONDS and not self._second.done():
            self._second.set_result(None)
            self._send(Stopping(signal.Signals(number).name, again=True))


def _signals() -> dict[int, int]:
    """signal that ends the job -> signal that it is treated as"""
    ends: dict[int, int] = {signal.SIGINT: signal.SIGINT, signal.SIGTERM: signal.SIGTERM, signal.SIGHUP: signal.SIGTERM}
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        del ends[signal.SIGHUP]
    return ends


async def _first(*awaited: asyncio.Future[Any], seconds: float) -> None:
    await asyncio.wait(awaited, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
