"""Writes the records of a job: events, metrics, traces, the summary, and lines on the console.

    recorder = Recorder(settings, run, events, progress, job, spans)
    recorder.measured(worker, message)    # also `described`, `progress` and `resumed`: messages of workers
    recorder.event(Respawned(worker="1.2", respawns=1))
    recorder.began(job)                   # a job has replaced the current one
    recorder.handled(event, outcome)      # each event of the job, with its notes
    recorder.finished(digests)
    await recorder.read_history()         # on a new coordinator; `took_over` uses the result
    recorder.took_over(takeover, found)

It only records: its methods return nothing and do not raise (`guarded`).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from recycle_schedules import OpKind, TensorKind, Worker
from recycle_schedules.layers import Layout

from recycle_pp.config.settings import Settings
from recycle_pp.protocol.events import Event as JobEvent
from recycle_pp.protocol.events import Outcome
from recycle_pp.protocol.job import Job
from recycle_pp.protocol.takeover import Found
from recycle_pp.timing.span_tables import SpanTables
from recycle_pp.wire.messages.agreement import Takeover
from recycle_pp.wire.messages.generations import Resumed
from recycle_pp.wire.messages.lifecycle import FirstOps, Ready
from recycle_pp.wire.messages.steps import Commit, Measured, OpProgress, Span
from recycle_pp.wire.messages.supervisors import Death, KeepLines
from recycle_pp.wire.records import Summary

from .background import Background, in_time
from .efficiency import Efficiency
from .event_log import EventLog, Expected
from .events.coordinators import CoordinatorElected, CoordinatorLost
from .events.deaths import DeathDetected, DeathExplained
from .events.event import Event
from .events.job import Finished, PlanAdopted, Repeated, Started, Stopped
from .events.recovery import Restored
from .events.workers import GivenUp, Left, Mismatch, Rejoined, Slow, SlowNoMore
from .guard import guarded, guarded_returning
from .history import History
from .lines import Lines
from .progress import Progress
from .protocol_log import ProtocolLog
from .recovery import Part, Recovery
from .run_folder import RunFolder
from .step_records import StepRecords
from .traces import Traces

Json = dict[str, Any]
Process = tuple[int, int]
"""Rank and incarnation of a worker's process"""
_MAKERS = {TensorKind.ACTIVATION: OpKind.FORWARD, TensorKind.GRADIENT: OpKind.BACKWARD_INPUT}
UNKNOWN = Death("unknown", "its supervisor has not reported the cause")


class Recorder:
    def __init__(
        self, settings: Settings, run: RunFolder, events: EventLog, progress: Progress, job: Job, spans: SpanTables
    ) -> None:
        self._settings = settings
        self._run = run
        self._events = events
        self._progress = progress
        self._spans = spans
        self._log = ProtocolLog(run.protocol, events.term, run.later.permitted)
        self._efficiency = Efficiency(settings)
        show = partial(events.then, progress.step)
        self._steps = StepRecords(settings, run, events.term, show, events.unwritten, self._efficiency)
        self._started_at = time.monotonic()
        self._first_ops = Lines(run.first_ops, run.later, events.term)
        self._later = Background("traces")
        self._later.permitted = run.later.permitted
        self._traces = Traces(run, self._later, spans)
        self._recovery: Recovery | None = None
        self._stalls: list[float] = []
        self._lost = 0  # number of lost ops
        self._deaths = 0
        self._dead: dict[Process, Expected] = {}  # events of deaths: the newest one of each rank, and incomplete ones
        self._started = False
        self._history = History()
        self.began(job)

    # -- messages of workers --------------------------------------------------------------------------------------

    @guarded
    def described(self, message: Ready) -> None:
        self._efficiency.describe(message.units, message.platform)

    @guarded
    def measured(self, worker: Worker, message: Measured) -> None:
        self._steps.measured(worker, message)

    @guarded
    def first_ops(self, worker: Worker, host: str | None, message: FirstOps) -> None:
        """Writes a line of receipts/first-forward.jsonl."""
        about = {key: value for key, value in msgspec.to_builtins(message).items() if key != "type"}
        head = {"time": time.time(), "step": self._job.committed + 1, "worker": str(worker), "host": host}
        self._first_ops.write(head | about)

    @guarded
    def progress(self, worker: Worker, message: OpProgress) -> None:
        here = partial(self._spans.local, worker)
        *op, start = message.running
        self._traces.progress(worker, message.step, _spans_here(message.spans, here), [*op, here(start)])

    @guarded
    def resumed(self, worker: Worker, message: Resumed) -> None:
        if self._recovery:
            here = partial(self._spans.local, worker)
            times = {phase: here(at) for phase, at in message.times.items()}
            self._recovery.resumed(worker, message.generation, times)
            if self._recovery.complete(self._job):
                self._close_recovery()

    # -- events of the job ----------------------------------------------------------------------------------

    @guarded
    def event(self, event: Event) -> None:
        """Records an event with the current generation and the first step that is not committed."""
        self._events.record(self._dated(event))

    def _dated(self, event: Event) -> Event:
        return msgspec.structs.replace(event, step=self._job.committed + 1, generation=self._job.generation)

    @guarded
    def say(self, sentence: str) -> None:
        """Prints a sentence without an event."""
        self._progress.say(sentence)

    @guarded
    def death(self, worker: Worker, process: Process, now: float, stood: float | None = None) -> None:
        """Records a death whose cause is not known yet. Later events wait for `explain_death` or `suppose_death`.

        Call it before the job plans around the death.

        now:   monotonic seconds
        stood: for a hung worker, seconds since its last progress, when the stall began; None for any other death
        """
        known = {of: event for of, event in self._dead.items() if of[0] != process[0] or not event.complete}
        event = self._events.expect(self._dated(DeathDetected(worker=str(worker), **_cause(UNKNOWN))))
        self._dead = known | {process: event}
        self._deaths += 1
        self._steps.died(worker)
        if worker in self._job.workers.values() and self._job.phase != "starting":
            self._begin_recovery(worker, now, stood)
        self._traces.died(worker, now)

    @guarded
    def found_dead(self, worker: Worker, process: Process, now: float) -> None:
        """Records a death that happened before the take-over, unless an earlier coordinator has recorded it."""
        if str(worker) not in self._history.dead:
            self.death(worker, process, now)

    def _begin_recovery(self, worker: Worker, now: float, stood: float | None = None) -> None:
        self._recovery = self._recovery or Recovery(self._job.committed + 1)
        self._recovery.death(worker, now)
        if stood is not None:
            self._recovery.died(worker, now - stood)
        self._traces.mark(self._recovery.step, self._recovery)

    @guarded
    def explain_death(self, process: Process, death: Death) -> None:
        """Completes the event of a death with its cause. If the event was already written with a wrong provisional
        cause, records `DeathExplained`.

        Does nothing if an earlier coordinator recorded the death. The same holds for `suppose_death` and `given_up`.
        """
        event = self._dead.get(process)
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
    def suppose_death(self, process: Process, death: Death) -> None:
        """Completes the event of a death with a provisional cause, so that later events no longer wait."""
        event = self._dead.get(process)
        if event is not None and not event.complete:
            self._events.complete(event, **_cause(death))

    @guarded
    def given_up(self, process: Process, respawns: int) -> None:
        """Records that a dead worker is not restarted."""
        if process in self._dead:
            self.event(GivenUp(worker=str(self._dead[process].event.worker), respawns=respawns))

    @guarded
    def release(self) -> None:
        """Writes the events that are still waiting for the cause of a death."""
        self._events.release()

    def began(self, job: Job) -> None:
        """Switches to a new job, and records it from now on."""
        self._job = job
        self._log.began(job)

    def handled(self, event: JobEvent, outcome: Outcome) -> None:
        """Logs an event of the job, and records its notes."""
        self._log.handled(self._job, event, outcome)
        for note in outcome.notes:
            self._follow(note)

    @guarded
    def _follow(self, note: Json) -> None:
        kind = note["event"]
        if kind == "committed":
            self._committed(note["commit"])
        elif kind == "evaluated":
            samples = note["microbatches"] * self._settings.parallel.microbatch_size
            self._steps.validated(note["val_loss"], samples)
        elif kind == "announced":
            if self._recovery:
                self._recovery.announced(self._job.generation, time.monotonic())
        elif kind == "plan_adopted":
            if not self._started:
                self._started = True
                self._steps.started()
                self.event(Started(workers=len(self._job.live)))
            if self._recovery:
                self._recovery.planned(time.monotonic(), self._job, self._completed_by_dead(note))
            self.event(PlanAdopted(lost_ops=len(note["lost"]), revoked=note["revoked"]))
        elif kind == "restarted":
            self._restarted(note["committed"])
        elif kind == "repeated":
            self.event(Repeated(stages=note["stages"], attempt=note["attempt"]))
        elif kind == "mismatch":
            self._begin_recovery(note["worker"], time.monotonic())
            self.event(Mismatch(worker=str(note["worker"]), host=note["host"], detail=note["detail"]))
        elif kind in ("rejoined", "left"):
            self._traces.mark(self._job.committed + 1)
            self.event((Rejoined if kind == "rejoined" else Left)(worker=str(note["worker"])))

    def _completed_by_dead(self, note: Json) -> set[Part]:
        """Ops that dead workers had completed, as shown by their reports or by survivors that used the outputs."""
        step = note["step"]
        used = {(step, _MAKERS[kind], mb, stage) for kind, mb, stage in note["lost"]}
        return used | self._traces.completed_by_dead(step) | self._traces.completed_by_dead(step + 1)

    @guarded
    def speed_changed(self, worker: Worker, factor: float, against: str) -> None:
        """Records that plans after this step assume a different speed of the worker.

        factor   duration of the worker's ops as a multiple of the usual one; 1.0: it recovered
        against  whose duration is the usual one: "peers", or "itself" (the worker's own first steps)
        """
        self._traces.mark(self._job.committed + 1)
        event = Slow if factor > 1.0 else SlowNoMore
        self.event(event(worker=str(worker), factor=round(factor, 2), against=against))

    @guarded
    def relaid(self, layout: Layout) -> None:
        """Records the layout that steps use from now on: number of decoder layers of each stage; empty if unknown."""
        self._traces.layout = layout or None

    @guarded
    def layers_moved(self, event: Event) -> None:
        """Records an event of moving layers, and keeps the traces of the steps around it."""
        self._traces.mark(self._job.committed + 1)
        self.event(event)

    def _restarted(self, committed: int) -> None:
        """Records that all workers restart from a checkpoint. committed: newest step that was committed before
        the restart."""
        self._recovery = None
        first = self._job.first_step
        self._steps.restored(first)
        bubbles = self._traces.bubbles
        redone = self._traces.redone
        self._traces = Traces(self._run, self._later, self._spans)
        self._traces.bubbles = bubbles
        self._traces.redone = redone
        undone = (first, committed) if committed >= first else (None, None)
        self.event(Restored(checkpoint=first, undone_from=undone[0], undone_to=undone[1]))

    async def read_history(self) -> None:
        """Reads the records of earlier coordinators. If the disk is slow, uses only the copies of
        unwritten lines in this process."""
        kept = partial(History.of, [], [], self._run.kept)
        self._history = await in_time(guarded_returning(kept)(History.read), self._run) or kept()

    @guarded
    def took_over(self, takeover: Takeover, found: Found) -> None:
        """Continues the lost coordinator's files with the lines that it could not write, if this machine has copies.
        Removes the lines of steps that no live worker knows as committed."""
        history = self._history
        self._history = replace(history, cpu_steps=[])
        self._started = True
        self._deaths = history.deaths
        self._stalls = history.stalls
        self._steps.took_over(history)
        # Equal, because all ops lost in committed steps have been redone.
        self._lost = self._traces.redone = history.lost_ops
        self._started_at -= history.seconds
        self._events.restore(self._run.kept)
        self._steps.restore(self._run.kept)
        self.event(CoordinatorLost(rank=takeover.lost_rank))
        seconds = takeover.elected_at - takeover.lost_at
        self.event(CoordinatorElected(rank=takeover.rank, seconds=seconds))  # the line contains the new term
        self._recovery = Recovery(self._job.committed + 1)
        self._recovery.coordinator_lost(takeover.lost_at, takeover.elected_at)
        for member in sorted(found.members.keys() - found.live):
            self._recovery.death(found.members[member], takeover.lost_at)
        self._traces.mark(self._recovery.step, self._recovery)
        if found.begun:
            self._steps.cut(self._job.committed + 1)

    @guarded
    def record_missing_commit(self, commit: Commit) -> None:
        """Writes the line of a step, if the lost coordinator has not written it."""
        if commit.step > self._history.step:
            self._committed(commit)

    @guarded
    def stopped(self, reason: str) -> None:
        self._steps.complete()
        self.event(Stopped(reason=reason))

    @guarded
    def finished(self, digests: Mapping[Worker, Mapping[str, str]]) -> None:
        self._steps.complete()
        self._traces.finish(self._job)
        self.event(Finished())
        self._run.later(self._run.write_json, self._run.summary, self._summary(digests))

    @guarded
    def retry(self) -> None:
        """Retries the lines that the disk has rejected, and sends copies of late lines to the supervisors."""
        self._events.retry()
        self._steps.retry()
        self._events.unwritten.look()

    def share(self, send: Callable[[KeepLines], None]) -> None:
        """Sets the function that sends a message to all supervisors. They then keep copies of lines that the disk
        rejects."""
        self._events.unwritten.share(send)

    @guarded
    def share_with(self, send: Callable[[KeepLines], None]) -> None:
        """Sends the lines that the other supervisors keep to a supervisor that has just connected."""
        self._events.unwritten.share_with(send)

    def close(self) -> None:
        self._steps.complete()
        self.abandon()

    @guarded
    def abandon(self) -> None:
        """Closes the files so that another coordinator can write them. Drops a line that still lacks its val_loss."""
        self._steps.close()
        self._first_ops.close()

    async def flushed(self, seconds: float) -> None:
        """Waits until all records are on the disk, or for `seconds`."""
        await self._later.flushed(seconds)
        await self._log.flushed(seconds)
        await self._run.later.flushed(seconds)

    def _committed(self, commit: Commit) -> None:
        live = self._job.workers.values()
        tables = self._spans.of(commit.step)
        self._steps.committed(commit, live, [tables[worker] for worker in live if worker in tables])
        self._traces.committed(commit.step, self._job)

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
            cpu_seconds_per_step=self._steps.cpu_seconds,
            final_loss=self._steps.final_loss,
            weights_sha256=weights_sha256(digests),
        )


def _cause(death: Death) -> Json:
    return {"cause": death.cause, "detail": death.detail, "injected": death.injected}


def _spans_here(spans: list[Span], here: Callable[[float], float]) -> list[Any]:
    return [[kind, d, i, here(start), here(end)] for kind, d, i, start, end in spans]


def weights_sha256(digests: Mapping[Worker, Mapping[str, str]]) -> str | None:
    """SHA-256 over the digests of the parameters, sorted by name; None if the weights of peers differ. Does not depend
    on the order of layers in a stage or on the place of a tied tensor."""
    by_name: dict[str, str] = {}
    for of in digests.values():
        for name, digest in of.items():
            if by_name.setdefault(name, digest) != digest:
                return None
    return hashlib.sha256("".join(digest for _, digest in sorted(by_name.items())).encode()).hexdigest()
