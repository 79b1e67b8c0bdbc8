"""Measures the ops of a worker for traces and for the planner's profile, and observes when the device finishes them.

with spans.launch(step, kind, (1, 0), done), named(f"recycle/{kind}"): ...   # launches an op
spans.observe(AHEAD)                  # calls `done` of finished ops; blocks until at most AHEAD are unfinished
spans.observe()                       # blocks until the device has finished all launched ops
with spans.span(step, kind): ...      # launches an op and observes it
spans.take(step)                      # (kind, pipeline, index, start, end, own); times in seconds, monotonic clock

A span starts and ends when the device starts and ends the work, not when the host launches it. On a GPU the host
launches up to AHEAD ops before the device has finished the current op. No op therefore waits for its kernels to be
launched. An op counts as done, and has a span, when the host has observed its end. Ops end in the order in which they
were launched. On a CPU an op ends before the host can launch the next one.

A GPU reports the failure of an op late, in any later call. The exception then names the oldest unfinished op. The
failed op is this op or one of the AHEAD ops after it.

On a CPU, `own` is the length of a span minus the run delay. The run delay is the time in which the thread was ready to
run but had no core (from /proc/thread-self/schedstat). A busy machine lengthens only the span. A slow core, a sleep or
a SIGSTOP lengthens both the span and `own`. On a GPU, and on a system that does not report run delays, `own` is the
length of the span.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO, NamedTuple

from recycle_schedules import MicroBatch
from torch._C._profiler import _RecordFunctionFast

from recycle_pp.comm.device_errors import is_gpu_failure
from recycle_pp.timing.packing import Span
from recycle_pp.wire.messages.steps import OpProgress

from .marks import HostMarks, Mark, Marks

named = _RecordFunctionFast  # takes 0.4 us without a profiler; torch.profiler.record_function takes 10 us


AHEAD = 2  # number of ops launched before the device has finished the current one
POLL_SECONDS = 1e-4


class Launched(NamedTuple):
    """A launched op whose end the host has not observed.

    at     time of the launch
    delay  run delay during the launch, in seconds
    done   called when the op is done
    where  description of the op for exceptions; "" if it is not an op of the plan
    """

    step: int
    kind: str
    microbatch: MicroBatch
    begin: Mark
    end: Mark
    at: float
    delay: float
    done: Callable[[], None]
    where: str


class Spans:
    """The measured ops of one worker.

    interval  minimum seconds between two results of `news` that are not None
    marks     places marks in the device's work
    on_wait   called with (kind, step, micro-batch) of the op when `observe` is about to block on it
    """

    def __init__(
        self,
        interval: float = 0.05,
        marks: Marks | None = None,
        on_wait: Callable[[str, int, MicroBatch], None] = lambda kind, step, microbatch: None,
    ) -> None:
        self._interval = interval
        self._marks = marks or HostMarks()
        self._on_wait = on_wait
        self._reported_at = 0.0
        self._reported = 0  # number of spans of step `_step` that `news` has reported
        self._step = -1
        self._spans: dict[int, list[Span]] = {}
        self._running: tuple[str, float, Mark] | None = None  # kind, time and mark of the start of the running launch
        self._launched: list[Launched] = []  # oldest first; replaced as a whole, because `left` reads it
        self._free = 0.0  # time at which the device finished the last observed op
        self._waited = 0.0  # run delay at the start of the running launch
        self._delays: BinaryIO | None = None
        self._opened = False
        self._last: dict[str, float] = {}  # kind -> length of the last span of this kind, in seconds
        self.first: dict[str, float] = {}  # kind -> own seconds of the first span

    @contextmanager
    def launch(self, step: int, kind: str, microbatch: MicroBatch, done: Callable[[], None]) -> Iterator[None]:
        """Measures the work that the body launches. Names the op in exceptions, because an op that fails on two workers
        points to an error in the code, not in a worker.

        done: called by `observe` when the device has finished the op"""
        where = f"{kind} of micro-batch {microbatch[0]}.{microbatch[1]} in step {step}"
        try:
            with self._measured(step, kind, microbatch, done, where):
                yield
        except Exception as error:
            self.locate(error, where)
            raise

    def locate(self, error: Exception, where: str = "") -> None:
        """Names an op in an exception: the oldest unfinished op if a GPU has failed, else `where`."""
        if self._launched and is_gpu_failure(error):
            where = self._launched[0].where
        if where:
            error.recycle_where = where  # type: ignore[attr-defined]

    @contextmanager
    def span(self, step: int, kind: str, microbatch: MicroBatch = (0, 0)) -> Iterator[None]:
        """Measures the body. Blocks until the device has finished it."""
        with self._measured(step, kind, microbatch, lambda: None, ""):
            yield
        self.observe()

    @contextmanager
    def _measured(
        self, step: int, kind: str, microbatch: MicroBatch, done: Callable[[], None], where: str
    ) -> Iterator[None]:
        self._waited = self._run_delay()
        begin, at = self._marks.place(), time.monotonic()
        self._running = kind, at, begin
        yield
        end = self._marks.place()
        op = Launched(step, kind, microbatch, begin, end, at, self._run_delay() - self._waited, done, where)
        self._launched = [*self._launched, op]
        self._running = None

    def observe(self, ahead: int = 0, until: Callable[[], bool] | None = None) -> None:
        """Observes finished ops. Blocks until at most `ahead` ops are unfinished, or until `until` returns True."""
        while self._launched:
            op = self._launched[0]
            try:
                if not op.end.reached() and (len(self._launched) <= ahead or not self._wait(op, until)):
                    return
            except RuntimeError as error:
                error.recycle_where = op.where  # type: ignore[attr-defined]
                raise
            self._finish(op)

    def _wait(self, op: Launched, until: Callable[[], bool] | None) -> bool:
        """Waits until the op is done. Returns False if `until` returns True first."""
        self._on_wait(op.kind, op.step, op.microbatch)
        if until is None:
            op.end.wait()
        else:
            while not op.end.reached():
                if until():
                    return False
                time.sleep(POLL_SECONDS)
        return True

    def _finish(self, op: Launched) -> None:
        start, end = op.begin.time(), op.end.time()
        own = self._own(start, end, op.delay)
        self._last[op.kind], self._free = end - start, end
        self.first.setdefault(op.kind, own)
        self._spans.setdefault(op.step, []).append((op.kind, *op.microbatch, start, end, own))
        self._launched = self._launched[1:]
        op.done()

    def take(self, step: int) -> list[Span]:
        """The spans of a step. Keeps them until `take` is called for a later step, because a vote may be
        repeated."""
        self._spans = {k: v for k, v in self._spans.items() if k >= step}
        return self._spans.get(step, [])

    def news(self, step: int, kind: str, microbatch: MicroBatch) -> OpProgress | None:
        """A report: the step's spans since the last report, and the op that begins now. None if the last report is less
        than `interval` seconds old.

        If the worker dies before its vote, the coordinator knows only the spans in these reports.
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
        """Own seconds of the running op so far. Blocks until the device has finished all launched work."""
        assert self._running is not None
        now = self._marks.place()
        now.wait()
        return self._own(self._running[2].time(), now.time(), self._run_delay() - self._waited)

    def forget_after(self, step: int) -> None:
        """Drops the spans of all steps after `step`, because their work was discarded."""
        self._spans = {k: v for k, v in self._spans.items() if k <= step}

    def left(self) -> float:
        """Estimated seconds until the end of the running op and of all launched ops; 0 if no op runs. The estimate
        assumes that each op takes as long as the last op of its kind. May be called from any thread."""
        running = self._running
        ops = [(op.kind, op.at) for op in self._launched] + ([running[:2]] if running else [])
        end = self._free
        for kind, at in ops:
            end = max(end, at) + self._last.get(kind, 0.0)
        return max(0.0, end - time.monotonic()) if ops else 0.0

    def _own(self, start: float, end: float, delay: float) -> float:
        return max(0.0, end - start - (delay if self._marks.on_host else 0.0))

    def _run_delay(self) -> float:
        """Total seconds in which the calling thread was ready to run but had no core. Only one thread may call
        this."""
        if not self._opened:
            self._opened = True
            with suppress(OSError):
                self._delays = open("/proc/thread-self/schedstat", "rb", buffering=0)  # noqa: SIM115
        if self._delays is None:
            return 0.0
        return int(os.pread(self._delays.fileno(), 64, 0).split()[1]) / 1e9
