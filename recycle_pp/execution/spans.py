"""What a worker did when: the measured part of a Trace, and the planner's profile.

with spans.span(step, kind, (1, 0)), named(f"recycle/{kind}"): ...
spans.take(step)                      # (kind, pipeline, index, start, end, own) in seconds of this machine's clock

A span ends when the device has done the work, not when the host has asked for it: durations make the planner's profile,
and an op that is told as done must be done. It costs a GPU the gap between two launches once an op.

`own` is a span's time less what its thread waited for a core (run delay, /proc/thread-self/schedstat): a busy machine
lengthens the span and not that, while a slow core, a GPU, a sleep or a SIGSTOP lengthens both. Where the system does
not tell the run delay, both are the same.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO

from recycle_schedules import MicroBatch
from torch._C._profiler import _RecordFunctionFast

from recycle_pp.telemetry.packing import Span
from recycle_pp.wire.messages.workers import OpProgress

named = _RecordFunctionFast  # torch.profiler.record_function takes 10 us where nobody profiles, this 0.4


class Spans:
    """interval: seconds between two `news`. finish: waits until the device has done what it was asked for."""

    def __init__(self, interval: float = 0.05, finish: Callable[[], None] = lambda: None) -> None:
        self._interval, self._finish = interval, finish
        self._told = 0.0
        self._untold = 0  # spans of the step that were not in the news
        self._step = -1
        self._spans: dict[int, list[Span]] = {}
        self._running: tuple[str, float] | None = None
        self._waited = 0.0  # for a core, before the running span
        self._delays: BinaryIO | None = None
        self._asked = False
        self._last: dict[str, float] = {}  # kind -> seconds of the last such span

    @contextmanager
    def span(self, step: int, kind: str, microbatch: MicroBatch = (0, 0)) -> Iterator[None]:
        self._waited = self._run_delay()
        start = time.monotonic()
        self._running = (kind, start)
        yield
        self._finish()
        end = time.monotonic()
        own = self._own(start, end)
        self._running = None
        self._last[kind] = end - start
        self._spans.setdefault(step, []).append((kind, *microbatch, start, end, own))

    def take(self, step: int) -> list[Span]:
        """All spans of a step so far. They stay until a later step is asked for: a vote may have to be repeated."""
        self._spans = {k: v for k, v in self._spans.items() if k >= step}
        return self._spans.get(step, [])

    def news(self, step: int, kind: str, microbatch: MicroBatch) -> OpProgress | None:
        """What was done of the step since the last news, and that this op begins now; None if the last news is too
        fresh. All that is known of a worker that dies."""
        now = time.monotonic()
        if now - self._told < self._interval:
            return None
        if step != self._step:
            self._step, self._untold = step, 0
        spans = [span[:5] for span in self._spans.get(step, [])[self._untold :]]
        self._told, self._untold = now, self._untold + len(spans)
        return OpProgress(step, spans, (kind, *microbatch, now))

    def spent(self) -> float:
        """Seconds of its own that the running span's work has taken."""
        assert self._running is not None
        self._finish()
        return self._own(self._running[1], time.monotonic())

    def forget_after(self, step: int) -> None:
        """Work on later steps was void."""
        self._spans = {k: v for k, v in self._spans.items() if k <= step}

    def left(self) -> float:
        """Seconds until the running op will be over, from how long the last one of its kind took."""
        running = self._running
        if running is None:
            return 0.0
        kind, start = running
        return max(0.0, start + self._last.get(kind, 0.0) - time.monotonic())

    def _own(self, start: float, end: float) -> float:
        return max(0.0, end - start - (self._run_delay() - self._waited))

    def _run_delay(self) -> float:
        """Seconds for which the calling thread was ready to run and had no core; always the same thread's."""
        if not self._asked:
            self._asked = True
            with suppress(OSError):
                self._delays = open("/proc/thread-self/schedstat", "rb", buffering=0)  # noqa: SIM115
        if self._delays is None:
            return 0.0
        return int(os.pread(self._delays.fileno(), 64, 0).split()[1]) / 1e9
