"""Writes the records of a job: events, metrics, traces, the summary, and lines on the console.

    recorder = Recorder(settings, run, events, progress, job, spans)
    recorder.measured(worker, message)    # also `progress` and `resumed`: messages of workers
    recorder.event(Respawned(worker="1.2", respawns=1))
    recorder.follow(note)                 # each note of the job
    recorder.finished(digests)

It only records: no other part of the job reads a value from it. Its methods do not raise (`guarded`).

(Longer than other files, because all its methods write to the same few files.)
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import msgspec
from recycle_schedules import OpKind, TensorKind, Worker

from recycle_pp.config.settings import Settings
from recycle_pp.protocol.job import Job
from recycle_pp.wire.messages.supervisors import Death
from recycle_pp.wire.messages.workers import (
    Commit,
    Measured,
    OpProgress,
    Resumed,
    Span,
)

from .background import Background
from .event_log import EventLog, Expected
from .events.coordinators import CoordinatorElected, CoordinatorLost
from .events.deaths import DeathDetected, DeathExplained
from .events.event import Event
from .events.job import Finished, PlanAdopted, Repeated, Started, Stopped
from .events.recovery import Restored
from .events.workers import Left, Mismatch, Rejoined, Slow, SlowNoMore
from .guard import guarded, guarded_returning
from .history import History
from .lines import Lines
from .progress import Progress
from .recovery import Part, Recovery
from .run_folder import RunFolder, Summary
from .running_median import RunningMedian
from .span_tables import SpanTables
from .takeover import Takeover
from .traces import Traces

Json = dict[str, Any]
_MAKERS = {TensorKind.ACTIVATION: OpKind.FORWARD, TensorKind.GRADIENT: OpKind.BACKWARD_INPUT}
UNKNOWN = Death("unknown", "its supervisor has not reported the cause")


def _no_event() -> Expected | None:
    return None


class Recorder:
    def __init__(
        self, settings: Settings, run: RunFolder, events: EventLog, progress: Progress, job: Job, spans: SpanTables
    ) -> None:
        self._settings = settings
        self._run = run
        self._events = events
        self._progress = progress
        self._job = job
        self._spans = spans
        self._metrics = Lines(run.metrics, run.later, events.term)
        self._sample_log = Lines(run.samples, run.later, events.term) if settings.run.sample_log else None
        self._samples: dict[int, list[int]] = {}  # by step: sample ids in its gradient
        self._started_at = time.monotonic()
        self._step_ended = self._started_at
        self._line: Json | None = None  # metrics of a step that wait for its val_loss
        self._later = Background("traces")
        self._later.permitted = lambda: run.later.permitted()
        self._traces = Traces(run, self._later, spans)
        self._cpu: dict[Worker, float] = {}
        self._cpu_now = 0.0  # of the current step
        self._cpu_last, self._steps = 0.0, 0  # of the last step; number of steps
        self._cpu_steps = RunningMedian()  # of all steps but the first two
        self._own_cpu = time.process_time()
        self._logged: dict[Worker, int] = {}
        self._recovery: Recovery | None = None
        self._stalls: list[float] = []
        self._lost = 0  # ops
        self._deaths = 0
        self._final_loss: float | None = None
        self._lr = 0.0
        self._started = False
        self._recorded = -1  # newest step that an earlier coordinator recorded

    # -- messages of workers --------------------------------------------------------------------------------------

    @guarded
    def measured(self, worker: Worker, message: Measured) -> None:
        if message.samples:
            self._samples[message.step] = message.samples
        self._logged[worker] = message.logged_bytes
        self._lr = message.lr
        before = self._cpu.get(worker)
        self._cpu[worker] = message.cpu
        if before is not None:
            self._cpu_now += message.cpu - before

    @guarded
    def progress(self, worker: Worker, message: OpProgress) -> None:
        here = partial(self._spans.local, worker)
        *op, start = message.running
        self._traces.progress(worker, message.step, _spans_here(message.spans, here), [*op, here(start)])

    @guarded
    def resumed(self, worker: Worker, message: Resumed) -> None:
        if self._recovery:
            here = partial(self._spans.local, worker)
            self._recovery.resumed(worker, {phase: here(at) for phase, at in message.times.items()})
            if self._recovery.complete(self._job):
                self._close_recovery()

    # -- events of the job ----------------------------------------------------------------------------------

    @guarded
    def event(self, event: Event) -> None:
        """Records an event of this moment: with the step that runs or comes next, and the generation."""
        self._events.record(self._dated(event))

    def _dated(self, event: Event) -> Event:
        return msgspec.structs.replace(event, step=self._job.committed + 1, generation=self._job.generation)

    @guarded
    def say(self, sentence: str) -> None:
        """Prints a sentence without an event."""
        self._progress.say(sentence)

    @guarded_returning(_no_event)
    def death(self, worker: Worker, now: float, stood: float | None = None) -> Expected | None:
        """Records a death whose cause is not known yet. Later events wait for `explain_death` or `suppose_death`.

        Call it before the job plans around the death.

        now:   monotonic seconds
        stood: of a hung worker, seconds since its last progress; its stall counts from then
        """
        event = self._events.expect(self._dated(DeathDetected(worker=str(worker), **_cause(UNKNOWN))))
        self._deaths += 1
        self._cpu.pop(worker, None)
        if worker in self._job.live and self._job.phase != "starting":
            self._begin_recovery(worker, now, stood)
        self._traces.died(worker, now)
        return event

    def _begin_recovery(self, worker: Worker, now: float, stood: float | None = None) -> None:
        self._recovery = self._recovery or Recovery(self._job.committed + 1)
        self._recovery.death(worker, now)
        if stood is not None:
            self._recovery.died(worker, now - stood)
        self._traces.mark(self._recovery.step, self._recovery)

    @guarded
    def explain_death(self, event: Expected | None, death: Death) -> None:
        """Completes the event of a death with its cause. If it was written with another cause, adds `DeathExplained`.

        event: None if an earlier coordinator has written it
        """
        if event is None:
            return
        cause = _cause(death)
        name = str(event.event.worker)
        if not event.complete:
            self._events.complete(event, **cause)
        elif event.event != msgspec.structs.replace(event.event, **cause):
            self.event(DeathExplained(worker=name, **cause))
        if self._recovery and death.at is not None:
            worker = Worker.parse(name)
            self._recovery.died(worker, self._spans.local(worker, death.at))

    @guarded
    def suppose_death(self, event: Expected | None, death: Death) -> None:
        """Completes the event of a death with a provisional cause, so that later events wait no longer."""
        if event is not None and not event.complete:
            self._events.complete(event, **_cause(death))

    @guarded
    def release(self) -> None:
        """Writes the events that still wait for the cause of a death."""
        self._events.release()

    @guarded
    def follow(self, note: Json) -> None:
        """Records a note of the job."""
        kind = note["event"]
        if kind == "committed":
            self._committed(note["commit"])
        elif kind == "evaluated":
            samples = note["microbatches"] * self._settings.parallel.microbatch_size
            self._write_line(val_loss=note["val_loss"], val_samples=samples)
        elif kind == "announced":
            if self._recovery:
                self._recovery.announced(time.monotonic())
        elif kind == "plan_adopted":
            if not self._started:
                self._started = True
                self._step_ended = time.monotonic()  # the start is not a part of the first step
                self.event(Started(workers=len(self._job.live)))
            if self._recovery:
                self._recovery.planned(time.monotonic(), self._job, self._completed_by_dead(note))
            self.event(PlanAdopted(lost_ops=len(note["lost"]), revoked=note["revoked"]))
        elif kind == "repeated":
            self.event(Repeated(stages=note["stages"], attempt=note["attempt"]))
        elif kind == "mismatch":
            self._begin_recovery(note["worker"], time.monotonic())
            self.event(Mismatch(worker=str(note["worker"]), host=note["host"], detail=note["detail"]))
        elif kind in ("rejoined", "left"):
            self._traces.mark(self._job.committed + 1)
            self.event((Rejoined if kind == "rejoined" else Left)(worker=str(note["worker"])))

    def _completed_by_dead(self, note: Json) -> set[Part]:
        """Ops that dead workers had completed: they reported them, or a survivor has used their outputs."""
        step = note["step"]
        used = {(step, _MAKERS[kind], mb, stage) for kind, mb, stage in note["lost"]}
        return used | self._traces.completed_by_dead(step) | self._traces.completed_by_dead(step + 1)

    @guarded
    def speed_changed(self, worker: Worker, factor: float) -> None:
        """Records that plans after this step assume another speed of the worker.

        factor: duration of its ops relative to its peers
        """
        self._traces.mark(self._job.committed + 1)
        event = Slow if factor > 1.0 else SlowNoMore
        self.event(event(worker=str(worker), factor=round(factor, 2)))

    def restored(self, job: Job) -> None:
        """All workers restart from a checkpoint; `job` replaces the job that lost a stage."""
        committed = self._job.committed
        self._job = job
        self._recovery = None
        self._record_restore(committed)

    @guarded
    def _record_restore(self, committed: int) -> None:
        """committed: newest step committed before the restore."""
        first = self._job.first_step
        self._write_line()
        self._cut(first)
        bubbles = self._traces.bubbles
        redone = self._traces.redone
        self._traces = Traces(self._run, self._later, self._spans)
        self._traces.bubbles = bubbles
        self._traces.redone = redone
        self._cpu.clear()
        undone = (first, committed) if committed >= first else (None, None)
        self.event(Restored(checkpoint=first, undone_from=undone[0], undone_to=undone[1]))

    def _cut(self, steps: int) -> None:
        """Removes the lines of undone steps: all after the first `steps` ones."""
        self._samples = {step: samples for step, samples in self._samples.items() if step < steps}
        self._metrics.cut(steps)
        if self._sample_log is not None:
            self._sample_log.cut(steps)

    def took_over(self, job: Job, takeover: Takeover, history: History, dead: Collection[Worker]) -> None:
        """Continues the files of the lost coordinator, as far as they are on this machine."""
        self._job = job
        self._started = True
        self._record_takeover(job, takeover, history, dead)

    @guarded
    def _record_takeover(self, job: Job, takeover: Takeover, history: History, dead: Collection[Worker]) -> None:
        self._deaths = history.deaths
        self._stalls = history.stalls
        self._cpu_steps = RunningMedian(history.cpu_steps[2:])
        self._steps = len(history.cpu_steps)
        self._lost = self._traces.redone = history.lost_ops  # lost ops of committed steps were redone
        self._started_at -= history.seconds
        self._recorded = history.step
        self._final_loss = history.loss
        lost = takeover.lost_rank
        rank = takeover.rank
        self.event(CoordinatorLost(rank=lost))
        seconds = takeover.elected_at - takeover.lost_at
        self.event(CoordinatorElected(rank=rank, seconds=seconds))  # its line has the term
        self._recovery = Recovery(job.committed + 1)
        self._recovery.coordinator_lost(takeover.lost_at, takeover.elected_at)
        for worker in sorted(dead):
            self._recovery.death(worker, takeover.lost_at)
        self._traces.mark(self._recovery.step, self._recovery)

    @guarded
    def remove_undone(self) -> None:
        """Removes the lines of steps that the lost coordinator recorded and no live worker knows as committed."""
        self._cut(self._job.committed + 1)

    @guarded
    def record_missing_commit(self, commit: Commit) -> None:
        """Writes the line of a step, if the lost coordinator has not written it."""
        if commit.step > self._recorded:
            self._committed(commit)

    @guarded
    def stopped(self, reason: str) -> None:
        self._write_line()
        self.event(Stopped(reason=reason))

    @guarded
    def finished(self, digests: Mapping[Worker, Mapping[str, str]]) -> None:
        self._write_line()
        self._traces.finish(self._job)
        self.event(Finished())
        self._run.later(self._run.write_json, self._run.summary, self._summary(digests).to_json())

    @guarded
    def retry(self) -> None:
        """Retries the lines that the disk has rejected."""
        self._events.retry()
        self._metrics.retry()
        if self._sample_log is not None:
            self._sample_log.retry()

    def close(self) -> None:
        self._write_line()
        self.abandon()

    @guarded
    def abandon(self) -> None:
        """Closes the files for another coordinator. A line that still waits for its val_loss is dropped."""
        self._metrics.close()
        if self._sample_log is not None:
            self._sample_log.close()

    async def flushed(self, seconds: float) -> None:
        """Waits until all records are on the disk, or for this time."""
        await self._later.flushed(seconds)
        await self._run.later.flushed(seconds)

    # -- steps -------------------------------------------------------------------------------------------------

    def _committed(self, commit: Commit) -> None:
        self._write_line()
        step = commit.step
        now = time.monotonic()
        s = self._settings
        tokens = s.parallel.pipelines * s.parallel.microbatches * s.parallel.microbatch_size * s.model.sequence
        live = [sum(w.stage == stage for w in self._job.live) for stage in range(s.parallel.stages)]
        seconds = now - self._step_ended
        self._step_ended = now
        self._final_loss = commit.loss
        self._line = {
            "time": time.time(),  # of the commit
            "step": step,
            "generation": commit.generation,
            "loss": commit.loss,
            "grad_norm": commit.norm,
            "clip_scale": commit.scale,
            "lr": self._lr,
            "step_seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "live_workers": sum(live),
            "least_live_stage": live.index(min(live)),
            "least_live": min(live),
            "logged_bytes": max(self._logged.values(), default=0),
            "cpu_seconds": self._cpu_now + time.process_time() - self._own_cpu,  # workers and coordinator
        }
        self._cpu_last = self._line["cpu_seconds"]
        self._cpu_now = 0.0
        self._own_cpu = time.process_time()
        self._steps += 1
        if self._steps > 2:
            self._cpu_steps.add(self._cpu_last)
        if not commit.evaluate:
            self._write_line()
        if self._sample_log is not None:
            self._sample_log.write({"step": step, "samples": self._samples.get(step, [])})
        self._samples = {of: samples for of, samples in self._samples.items() if of > step}
        self._traces.committed(step, self._job)

    def _write_line(self, **more: Any) -> None:
        if self._line is not None:
            line = self._line | more
            self._line = None
            self._metrics.write(line)
            self._events.then(self._progress.step, line)

    def _close_recovery(self) -> None:
        recovery = self._recovery
        self._recovery = None
        assert recovery is not None
        self._stalls.append(recovery.stall)
        self._lost += len(recovery.lost)
        self.event(recovery.event())

    # -- the end -----------------------------------------------------------------------------------------------

    def _summary(self, digests: Mapping[Worker, Mapping[str, str]]) -> Summary:
        s = self._settings
        steps = self._job.committed + 1
        samples = steps * s.parallel.pipelines * s.parallel.microbatches * s.parallel.microbatch_size
        return Summary(
            steps=steps,
            samples=samples,
            tokens=samples * s.model.sequence,
            deaths=self._deaths,
            stall_seconds=self._stalls,
            bubbles=self._traces.bubbles.median,
            lost_ops=self._lost,
            redone_ops=self._traces.redone,
            wall_seconds=time.monotonic() - self._started_at,
            cpu_seconds_per_step=self._cpu_steps.median or self._cpu_last,
            final_loss=self._final_loss,
            weights_sha256=weights_sha256(digests),
        )


def _cause(death: Death) -> Json:
    return {"cause": death.cause, "detail": death.detail, "injected": death.injected}


def _spans_here(spans: list[Span], here: Callable[[float], float]) -> list[Any]:
    return [[kind, d, i, here(start), here(end)] for kind, d, i, start, end in spans]


def weights_sha256(digests: Mapping[Worker, Mapping[str, str]]) -> str | None:
    """SHA-256 over the digests of the parameters in canonical order; None if the weights of peers differ."""
    by_name: dict[str, str] = {}
    for _, of in sorted(digests.items(), key=lambda item: (item[0].stage, item[0].pipeline)):
        for name, digest in of.items():
            if by_name.setdefault(name, digest) != digest:
                return None
    return hashlib.sha256("".join(by_name.values()).encode()).hexdigest()
