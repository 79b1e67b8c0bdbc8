"""Measures the ops of a worker, for traces and for the planner's profile.

with spans.span(step, kind, (1, 0)), named(f"recycle/{kind}"): ...
spans.take(step)                      # (kind, pipeline, index, start, end, own); times in seconds, monotonic clock

A span ends when the device has finished the work, not when the host has launched the work. Plans use the durations, and
an op that is reported as done must be done. On a GPU every op therefore costs one gap between launches.

`own` is the length of a span minus the run delay. The run delay is the time in which the thread was ready to run but
had no core (from /proc/thread-self/schedstat). A busy machine lengthens only the span. A slow core, a slow GPU, a sleep
or a SIGSTOP lengthens the span and `own`. On a system that does not report run delays, `own` is the length of the span.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO

from recycle_schedules import MicroBatch
from torch._C._profiler import _RecordFunctionFast

from recycle_pp.timing.packing import Span
from recycle_pp.wire.messages.steps import OpProgress

named = _RecordFunctionFast  # takes 0.4 us without a profiler, torch.profiler.record_function 10 us


class Spans:
    """
    interval  shortest time in seconds between two results of `news` other than None
    finish    function that waits until the device has finished the launched work
    """

    def __init__(self, interval: float = 0.05, finish: Callable[[], None] = lambda: None) -> None:
        self._interval = interval
        self._finish = finish
        self._reported_at = 0.0
        self._reported = 0  # number of spans of step `_step` that `news` has reported
        self._step = -1
        self._spans: dict[int, list[Span]] = {}
        self._running: tuple[str, float] | None = None
        self._waited = 0.0  # run delay at the start of the running span
        self._delays: BinaryIO | None = None
        self._opened = False
        self._last: dict[str, float] = {}  # kind -> length of the last span of this kind, in seconds

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
        """The spans of a step. They are kept until `take` is called for a later step, because a vote may be
        repeated."""
        self._spans = {k: v for k, v in self._spans.items() if k >= step}
        return self._spans.get(step, [])

    def news(self, step: int, kind: str, microbatch: MicroBatch) -> OpProgress | None:
        """The step's spans since the last report, and the op that begins now. None if the last report is less than
        `interval` seconds old.

        If the worker dies before its vote, the coordinator knows only the spans that were reported in this way.
        """
        now = time.monotonic()
        if now - self._reported_at < self._interval:
            return None
        if step != self._step:
            self._step = step
            self._reported = 0
        spans = [span[:5] for span in self._spans.get(step, [])[self._reported :]]
        self._reported_at = now
        self._reported += len(spans)
        return OpProgress(step, spans, (kind, *microbatch, now))

    def spent(self) -> float:
        """Own seconds of the running span so far."""
        assert self._running is not None
        self._finish()
        return self._own(self._running[1], time.monotonic())

    def forget_after(self, step: int) -> None:
        """Drops the spans of steps after `step`, because the work on these steps was discarded."""
        self._spans = {k: v for k, v in self._spans.items() if k <= step}

    def left(self) -> float:
        """Seconds until the expected end of the running op, estimated from the last op of the same kind. 0 if no op
        runs."""
        running = self._running
        if running is None:
            return 0.0
        kind, start = running
        return max(0.0, start + self._last.get(kind, 0.0) - time.monotonic())

    def _own(self, start: float, end: float) -> float:
        return max(0.0, end - start - (self._run_delay() - self._waited))

    def _run_delay(self) -> float:
        """Total seconds in which the calling thread was ready to run but had no core. To be called by one thread
        only."""
        if not self._opened:
            self._opened = True
            with suppress(OSError):
                self._delays = open("/proc/thread-self/schedstat", "rb", buffering=0)  # noqa: SIM115
        if self._delays is None:
            return 0.0
        return int(os.pread(self._delays.fileno(), 64, 0).split()[1]) / 1e9
