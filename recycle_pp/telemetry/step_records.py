"""Writes metrics.jsonl and samples.jsonl: a line for each committed step.

steps = StepRecords(settings, run, term, show, unwritten)
steps.measured(worker, message)       # before the commit of its step
steps.committed(commit, workers)      # writes the line, or keeps it for `validated` if the step is validated
steps.validated(val_loss, samples)
steps.cut(20)                         # steps 20 and later are rolled back
steps.final_loss, steps.cpu_seconds   # for the summary
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
from recycle_schedules import Worker

from recycle_pp.config.settings import Settings
from recycle_pp.wire.messages.steps import Commit, Measured

from .efficiency import Efficiency, phase_seconds
from .history import History
from .lines import Lines
from .run_folder import RunFolder
from .running_median import RunningMedian
from .unwritten import Unwritten

Json = dict[str, Any]


class StepRecords:
    def __init__(
        self,
        settings: Settings,
        run: RunFolder,
        term: Callable[[], int],
        show: Callable[[Json], None],
        unwritten: Unwritten,
        efficiency: Efficiency,
    ) -> None:
        """
        term: returns the writer's current term
        show: called with each line of metrics
        unwritten: see `Lines`
        """
        self._efficiency = efficiency
        self._settings = settings
        self._show = show
        self._metrics = Lines(run.metrics, run.later, term, unwritten)
        self._sample_log = Lines(run.samples, run.later, term, unwritten) if settings.run.sample_log else None
        self._files = [self._metrics] + ([] if self._sample_log is None else [self._sample_log])
        self._samples: dict[int, list[int]] = {}  # step -> ids of the samples in its gradient
        self._line: Json | None = None  # metrics of a step, while they wait for its val_loss
        self._step_ended = time.monotonic()
        self._cpu: dict[Worker, float] = {}
        self._cpu_now = 0.0  # CPU seconds of the workers in the current step
        self._own_cpu = time.process_time()
        self._cpu_last = 0.0  # CPU seconds of the last step
        self._count = 0  # number of steps
        self._cpu_steps = RunningMedian()  # CPU seconds of all steps but the first two
        self._logged: dict[Worker, int] = {}
        self._memory: dict[Worker, tuple[int, int]] = {}  # (peak, reserved) bytes
        self._lr = 0.0
        self.final_loss: float | None = None

    @property
    def cpu_seconds(self) -> float:
        """CPU seconds of all workers and the coordinator in a step, median over the steps."""
        return self._cpu_steps.median or self._cpu_last

    def started(self) -> None:
        """Starts the time of the first step. Called when the workers are ready, so that this step does not include the
        start of the job."""
        self._step_ended = time.monotonic()

    def measured(self, worker: Worker, message: Measured) -> None:
        if message.samples:
            self._samples[message.step] = message.samples
        self._logged[worker] = message.logged_bytes
        self._memory[worker] = message.memory
        self._lr = message.lr
        before = self._cpu.get(worker)
        self._cpu[worker] = message.cpu
        if before is not None and message.cpu >= before:  # it is lower if a new process now plays this worker
            self._cpu_now += message.cpu - before

    def committed(self, commit: Commit, live: Collection[Worker], spans: Collection[np.ndarray] = ()) -> None:
        """Writes the line of a committed step, or keeps it until `validated` if the step is validated.

        live   the workers that took part in the step
        spans  their tables of spans in this step
        """
        self.complete()
        step = commit.step
        now = time.monotonic()
        parallel = self._settings.parallel
        samples = parallel.pipelines * parallel.microbatches * parallel.microbatch_size
        by_stage = [sum(w.stage == stage for w in live) for stage in range(parallel.stages)]
        seconds = now - self._step_ended
        self._step_ended = now
        tokens = samples * self._settings.model.sequence / seconds
        peak, reserved = (max(of) for of in zip(*self._memory.values(), (0, 0), strict=True))
        self.final_loss = commit.loss
        self._line = {
            "time": time.time(),  # of the commit
            "step": step,
            "generation": commit.generation,
            "loss": commit.loss,
            "grad_norm": commit.norm,
            "clip_scale": commit.scale,
            "lr": self._lr,
            "step_seconds": seconds,
            "tokens_per_second": tokens,
            "tokens_per_second_per_worker": tokens / len(live),
            "live_workers": len(live),
            "least_live_stage": by_stage.index(min(by_stage)),
            "least_live": min(by_stage),
            "logged_bytes": max(self._logged.values(), default=0),
            "cpu_seconds": self._cpu_now + time.process_time() - self._own_cpu,  # workers and coordinator
        }
        self._line |= self._efficiency.of(tokens, len(live)) | phase_seconds(spans, len(live), seconds)
        self._line |= {key: of for key, of in (("peak_bytes", peak), ("reserved_bytes", reserved)) if of}
        self._cpu_last = self._line["cpu_seconds"]
        self._cpu_now = 0.0
        self._own_cpu = time.process_time()
        self._count += 1
        if self._count > 2:
            self._cpu_steps.add(self._cpu_last)
        if not commit.evaluate:
            self.complete()
        if self._sample_log is not None:
            self._sample_log.write({"step": step, "samples": self._samples.get(step, [])})
        self._samples = {of: samples for of, samples in self._samples.items() if of > step}

    def validated(self, val_loss: float, samples: int) -> None:
        """Completes the newest step's line. val_loss: mean loss over `samples` held-out samples."""
        self.complete(val_loss=val_loss, val_samples=samples)

    def complete(self, **more: Any) -> None:
        """Writes the line if it still waits for its val_loss. more: figures to add to it."""
        if self._line is not None:
            line = self._line | more
            self._line = None
            self._metrics.write(line)
            self._show(line)

    def died(self, worker: Worker) -> None:
        """Resets the worker's CPU time, because its next process starts at 0."""
        self._cpu.pop(worker, None)
        self._memory.pop(worker, None)

    def restored(self, steps: int) -> None:
        """Removes the lines of rolled-back steps, after all workers have restarted from a checkpoint of the first
        `steps` steps."""
        self.complete()
        self.cut(steps)
        self._cpu.clear()

    def cut(self, steps: int) -> None:
        """Keeps the lines of the first `steps` steps and removes all later ones."""
        self._samples = {step: samples for step, samples in self._samples.items() if step < steps}
        for file in self._files:
            file.cut(steps)

    def restore(self, kept: Unwritten) -> None:
        """Writes the lines that a lost coordinator could not write."""
        for file in self._files:
            file.restore(kept)

    def took_over(self, history: History) -> None:
        """Continues the counters of the lost coordinator."""
        self._cpu_steps = RunningMedian(history.cpu_steps[2:])
        self._count = len(history.cpu_steps)
        self.final_loss = history.loss
        if history.committed_at is not None:  # the current step began with the lost coordinator's last commit
            self._step_ended = min(self._step_ended, time.monotonic() - (time.time() - history.committed_at))

    def retry(self) -> None:
        """Retries the lines that the disk has rejected."""
        for file in self._files:
            file.retry()

    def close(self) -> None:
        """Closes the files. A line that still waits for its val_loss is not written."""
        for file in self._files:
            file.close()
