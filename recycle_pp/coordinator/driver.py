"""Runs `protocol.Job` on real connections: handles events, sends messages, saves checkpoints and ends the job.

driver = Driver(context, agreement, saving, job, deposed)
driver.subscribers.append(follow)          # follow(note) for each note of the job, in the order of the subscribers
driver.drive(WorkerDied(worker))
driver.begin(job)                          # replaces the job
driver.send(out)                           # messages that are not caused by an event of the job
driver.finish_if_done()                    # after everything that may delay the end of the job
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
from recycle_schedules import Problem, Worker

from recycle_pp.consensus.agreement import Agreement
from recycle_pp.consensus.agreement_gate import AgreementGate
from recycle_pp.protocol.events import (
    EndRequested,
    Event,
    Json,
    Outcome,
    PlanMade,
    ProblemChanged,
    SavingChanged,
    Send,
)
from recycle_pp.protocol.job import Job
from recycle_pp.telemetry.events.checkpoints import CheckpointDamaged, CheckpointFailed, CheckpointSkipped
from recycle_pp.telemetry.events.job import Ending as EndingEvent
from recycle_pp.telemetry.events.job import UpdateSkipped
from recycle_pp.telemetry.events.workers import Joining
from recycle_pp.wire.messages.generations import Adopt, Announce
from recycle_pp.wire.messages.lifecycle import Donate
from recycle_pp.wire.messages.saving import Digests, SaveFailed
from recycle_pp.wire.messages.steps import Commit
from recycle_pp.wire.messages.supervisors import EndsSoon

from .checkpoints import Saving
from .context import Context
from .ending import END_SECONDS, Ending
from .hang_detector import Standing
from .planning import Planning
from .replicas import difference


class Driver:
    """
    subscribers  called with each note of an event, after the messages of the event have been sent
    deposed      called when another coordinator has been elected
    """

    def __init__(
        self, context: Context, agreement: Agreement, saving: Saving, job: Job, deposed: Callable[[], None]
    ) -> None:
        self.saving = saving
        self.subscribers: list[Callable[[Json], None]] = [context.recorder.follow, self._follow]
        self._settings = context.settings
        self._roster = context.roster
        self._timers = context.timers
        self._recorder = context.recorder
        self._lifecycle = context.lifecycle
        self._spans = context.spans
        self.agreement_gate = AgreementGate(agreement, context.lease, self._deliver, deposed)
        self.planning = Planning(self._settings, context.run, self._planned, self._lifecycle.stop, context.lease)
        self.ending = Ending(self._settings, self._recorder.say)
        self._placed = False  # whether holders of sharded state were checked
        self._sessions: dict[Worker, int] = {}  # newest session of each joiner
        self.digests: dict[Worker, dict[str, str]] = {}  # digests of parameters, by finished worker
        self.begin(job)

    def begin(self, job: Job) -> None:
        """Continues with the job of a lost coordinator."""
        self.job = job
        self._recorder.began(job)

    def drive(self, event: Event) -> None:
        """Handles an event: sends the messages of the job and passes its notes to the subscribers."""
        if self._lifecycle.over:
            return
        saving = SavingChanged(self.saving.occupied, self.ending.save_due)
        if saving != self.job.saving:
            self.send(self._handle(saving).sends)
        outcome = self._handle(event)
        self.send(self._with_probes(outcome.sends))
        if outcome.expiry is not None:
            self._timers.after(self._settings.control.suspicion, self.drive, outcome.expiry)
        self.planning.look(self.job)
        for follow in self.subscribers:
            for note in outcome.notes:
                follow(note)
        self.finish_if_done()

    def _handle(self, event: Event) -> Outcome:
        outcome = self.job.handle(event)
        self._recorder.handled(event, outcome)
        return outcome

    def send(self, out: list[Send]) -> None:
        if not out:  # the usual case, after a vote: must not cost a loop over all workers
            return
        # The announcement is not always the first message: a successor first sends missed commits to workers.
        announced = next((message for _, message in out if isinstance(message, Announce)), None)
        if announced is not None:
            self.agreement_gate.announce(announced.generation, self._roster.places())
        self.agreement_gate.send(out)

    def _with_probes(self, out: list[Send]) -> list[Send]:
        """Adds link probes to the start of a generation with new hosts. Workers probe before their first op."""
        if not any(isinstance(message, Adopt) for _, message in out):
            return out
        probes = self.planning.probes(self.job.live)

        def with_its_probes(send: Send) -> Send:
            if not isinstance(send.message, Adopt) or send.to not in probes:
                return send
            return Send(send.to, msgspec.structs.replace(send.message, probes=probes[send.to]))

        return [with_its_probes(send) for send in out]

    def standing(self) -> Standing:
        """The state of the job, for the hang detector."""
        job = self.job
        works = self.planning.busy or self.agreement_gate.busy or job.phase not in ("reporting", "running")
        return Standing(job.committed + 1, job.generation, frozenset(job.live), frozenset(job.unanswered), works)

    def message_seconds(self, a: Worker, b: Worker) -> float:
        """Seconds that a message takes between workers of neighbouring stages; 0 if no step runs."""
        return self.job.graph.between(a, b) if self.job.phase == "running" else 0.0

    def finish_if_done(self) -> None:
        """Ends the job if nothing is left to do. An unfinished checkpoint delays the end, up to a time limit."""
        if self.saving.busy:
            return
        if self.job.skipped >= self._settings.optimizer.most_skipped:
            self._stop_skipping()
        if self.job.phase == "ended":
            self.end_early()
        if self.job.phase == "finished":
            if (wrong := difference(self.digests)) is not None:
                self._lifecycle.stop(f"{wrong} at the end: {self._wrong_weights()}")
                return
            self._lifecycle.finish(self.digests, int(self.saving.failed))

    def finish_early(self, name: str, code: int) -> None:
        """Ends the job after a signal: after the current step and a checkpoint, if the launcher leaves enough time."""
        if self._lifecycle.over or not self.ending.request(name, code):
            return
        if self.job.phase in ("starting", "lost") or self._settings.emulate.mode:
            self.end_early()
            return
        self._recorder.event(EndingEvent(signal=name))
        for rank in self._roster:
            rank.send(EndsSoon())
        self.drive(EndRequested())
        self._timers.after(END_SECONDS, self.end_early)

    def end_early(self) -> None:
        if not self._lifecycle.over:
            self._lifecycle.stop(self.ending.reason(self.saving.newest()), self.ending.code)

    def compare(self, worker: Worker, message: Digests) -> None:
        """Takes a worker's digests at a checkpoint. The checkpoint is assembled only if the digests of each stage
        agree."""
        self.send(self.saving.compared(worker, message))
        self._judge_replicas()

    def died(self, worker: Worker) -> None:
        """Stops waiting for a dead worker's part of a checkpoint and for its digests."""
        self.send(self.saving.died(worker, self.job.live))
        self._judge_replicas()

    def _judge_replicas(self) -> None:
        wrong = self.saving.replicas.verdict()
        if wrong is None:
            return
        if self.job.third and not self.saving.final:  # the next vote finds the wrong worker
            self.save_failed(SaveFailed(self.saving.step, wrong))
        else:
            self._lifecycle.stop(f"{wrong}: {self._wrong_weights()}")

    def _wrong_weights(self) -> str:
        newest = self.saving.newest()
        kept = f"run.resume=true continues from {newest}, saved earlier" if newest else "there is no earlier checkpoint"
        return f"memory or a processor has failed, and the job must not continue with wrong weights; {kept}"

    def save_failed(self, message: SaveFailed, worker: Worker | None = None) -> None:
        """Abandons a checkpoint. worker: the sender; None: this coordinator."""
        if self.saving.save_failed(message, worker) and not self._lifecycle.over:
            newest, seconds = self.saving.unsaved()
            self._recorder.event(
                CheckpointFailed(checkpoint=message.step, detail=message.detail, newest=newest, unsaved_seconds=seconds)
            )
        self.finish_if_done()

    def report_damage(self, damaged: Mapping[int, str]) -> None:
        """Records damaged checkpoints. damaged: steps in a checkpoint -> its damage."""
        for step, damage in damaged.items():
            self._recorder.event(CheckpointDamaged(checkpoint=step, detail=damage))

    def _follow(self, note: Json) -> None:
        match note["event"]:
            case "committed":
                self._follow_commit(note)
            case "plan_adopted" if not self._placed:  # at the start
                self._placed = True
                if warning := self.job.units.on_one_host():
                    self._recorder.say(warning)
            case "mismatch":  # the unfinished checkpoint may have the wrong state
                self.save_failed(SaveFailed(self.job.committed + 1, f"the state of worker {note['worker']} is wrong"))
            case "violation":
                self._lifecycle.stop(note["detail"])

    def _follow_commit(self, note: Json) -> None:
        commit = note["commit"]
        self.ending.committed(bool(commit.savers), note["skipped"])
        if commit.skipped:
            self._follow_skipped(commit)
        changed, problem = self.planning.measured(self._spans.of(commit.step), self.job)
        for worker, factor in changed:
            self._recorder.speed_changed(worker, factor)
        self._spans.drop(commit.step - 2)
        if note["skipped"]:
            by, (newest, seconds) = self.saving.slow(), self.saving.unsaved()
            self._recorder.event(
                CheckpointSkipped(checkpoint=commit.step + 1, by=by, newest=newest, unsaved_seconds=seconds)
            )
        if commit.savers and not self._settings.emulate.mode:
            self.saving.begin(commit.step + 1, commit.savers, commit.last, self.job.live)
            if commit.last:
                self._timers.after(self._settings.control.lease, self._abandon_slow_save, commit.step + 1)
        self.change(problem)  # last, because it may end the job

    def change(self, problem: Problem) -> None:
        """Plans the next steps with new durations or limits, if they differ."""
        if problem != self.job.problem:
            self.drive(ProblemChanged(problem))

    def _planned(self, problem: Problem) -> None:
        """Takes a plan from the planner's thread."""
        self.drive(PlanMade(problem))

    def _follow_skipped(self, commit: Commit) -> None:
        """Records a skipped update: a gradient was not finite, so weights and state are unchanged."""
        self._recorder.event(UpdateSkipped(in_a_row=commit.skipped))
        if commit.skipped == self._settings.optimizer.most_skipped and self.saving.busy:
            self._timers.after(self._settings.control.lease, self._abandon_slow_save, self.saving.step)

    def _stop_skipping(self) -> None:
        newest, most = self.saving.newest(), self._settings.optimizer.most_skipped
        self._lifecycle.stop(
            f"the updates of {self.job.skipped} steps in a row were skipped, as a gradient was NaN or infinite "
            f"(optimizer.most_skipped={most}); "
            + (f"the newest checkpoint is {newest}" if newest else "there is no checkpoint yet")
        )

    def _abandon_slow_save(self, step: int) -> None:
        """Abandons a checkpoint that takes too long, so that a hanging file system does not delay the end."""
        slow = self.saving.slow()
        seconds = self._settings.control.lease
        if self.saving.busy:
            self.save_failed(SaveFailed(step, f"{slow} did not finish writing within {seconds:g} s"))

    def _deliver(self, out: Sequence[Send]) -> None:
        self._roster.deliver([self._addressed(send) for send in out])

    def _addressed(self, send: Send) -> Send:
        """Adds the joiner's address to a `Donate`; returns other messages unchanged. Records `Joining` only for the
        first `Donate` of a session, although each donor gets one."""
        if not isinstance(donation := send.message, Donate):
            return send
        if self._sessions.get(donation.to) != donation.session:
            self._sessions[donation.to] = donation.session
            self._recorder.event(Joining(worker=str(donation.to), donor=str(send.to)))
        return Send(send.to, msgspec.structs.replace(donation, address=self._roster.address(donation.to)))
