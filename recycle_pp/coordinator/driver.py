"""Runs `protocol.Job` on real connections: handles events, sends messages and ends the job.

driver = Driver(state, agreement)
driver.handlers = (recorder, planning, ...)     # called in this order after each event
driver.drive(WorkerDied(member))
driver.change(problem)                     # plans the next steps with new durations or limits
driver.send(out)                           # sends messages that are not the outcome of an event
driver.finish_if_done()                    # ends the job, unless something still delays the end
driver.finish_early("SIGTERM", 143)        # after a signal
"""

from __future__ import annotations

from typing import Protocol

import msgspec
from recycle_schedules import Problem

from recycle_pp.consensus.agreement import Agreement
from recycle_pp.consensus.agreement_gate import AgreementGate
from recycle_pp.protocol.events import EndRequested, Event, Outcome, ProblemChanged, SavingChanged, Send
from recycle_pp.telemetry.events.job import Ending as EndingEvent
from recycle_pp.telemetry.events.workers import Joining
from recycle_pp.wire.messages.generations import Adopt, Announce
from recycle_pp.wire.messages.lifecycle import Donate
from recycle_pp.wire.messages.members import Member
from recycle_pp.wire.messages.supervisors import EndsSoon

from .ending import END_SECONDS
from .replicas import difference
from .state import JobState


class Handler(Protocol):
    def handled(self, event: Event, outcome: Outcome) -> None:
        """Called after each event of the job, once its messages are sent. May drive more events."""


class Driver:
    """handlers: called in this order after each event; set by `coordinator.py`."""

    def __init__(self, state: JobState, agreement: Agreement) -> None:
        self._state = state
        self.agreement_gate = AgreementGate(agreement, state.lease, state.roster.deliver)
        self.handlers: tuple[Handler, ...] = ()
        self._sessions: dict[Member, int] = {}  # follower -> its newest session

    def drive(self, event: Event) -> None:
        """Handles an event: sends its messages, and calls the handlers. Does nothing after the end of the job."""
        state = self._state
        if state.lifecycle.over:
            return
        kept = [*state.saving.kept(), *state.storing.kept()]
        in_use = {state.saving.step * state.saving.occupied, state.storing.uploading} - {0}
        # Until this coordinator has begun a save, a save of an earlier coordinator may be unfinished.
        known = sorted(in_use) if state.saving.step >= 0 else None
        saving = SavingChanged(state.saving.occupied, state.ending.save_due, kept, known)
        if saving != state.job.saving:
            self._handle(saving)
        self._handle(event)
        self.finish_if_done()

    def _handle(self, event: Event) -> None:
        outcome = self._state.job.handle(event)
        self.send(self._with_probes(outcome.sends))
        if outcome.expiry is not None:
            self._state.timers.after(self._state.settings.control.suspicion, self.drive, outcome.expiry)
        for handler in self.handlers:
            handler.handled(event, outcome)

    def change(self, problem: Problem) -> None:
        """Plans the next steps with new durations or limits, if they differ."""
        if problem != self._state.job.problem:
            self.drive(ProblemChanged(problem))

    # -- messages ----------------------------------------------------------------------------------------------

    def send(self, out: list[Send]) -> None:
        if not out:  # usual after a vote; avoids the cost of a loop over all workers
            return
        # The announcement need not be the first message, because a successor sends missed commits first.
        announced = next((message for _, message in out if isinstance(message, Announce)), None)
        if announced is not None:
            self.agreement_gate.announce(announced.generation, self._state.roster.places())
        self.agreement_gate.send([self._addressed(send) for send in out])

    def _with_probes(self, out: list[Send]) -> list[Send]:
        """Adds link probes to the orders of a generation with new hosts. Workers probe before their first op."""
        if not any(isinstance(message, Adopt) for _, message in out):
            return out
        workers = self._state.job.workers
        wanted, members = self._state.profile.links.wanted(workers.values()), {w: m for m, w in workers.items()}

        def with_its_probes(send: Send) -> Send:
            if not isinstance(send.message, Adopt):
                return send
            probes = {host: members[of] for host, of in wanted.get(workers[send.to], {}).items()}
            return Send(send.to, msgspec.structs.replace(send.message, probes=probes)) if probes else send

        return [with_its_probes(send) for send in out]

    def _addressed(self, send: Send) -> Send:
        """Adds the receiver's address to a `Donate`; returns other messages unchanged. A session has one `Donate` for
        each donor. For the first one, records the event `Joining`, unless the receiver is already a member."""
        if not isinstance(donation := send.message, Donate):
            return send
        roster = self._state.roster
        if self._sessions.get(donation.to) != donation.session:
            self._sessions[donation.to] = donation.session
            if donation.to not in self._state.job.live:
                self._state.recorder.event(Joining(worker=str(donation.worker), donor=str(roster[send.to].role)))
        return Send(send.to, msgspec.structs.replace(donation, address=roster[donation.to].address))

    # -- the end -----------------------------------------------------------------------------------------------

    def finish_if_done(self) -> None:
        """Ends the job if nothing is left to do. An unfinished checkpoint delays the end, up to a time limit."""
        state = self._state
        job = state.job
        if state.saving.busy or (state.storing.busy and state.storing.final):
            return
        if job.skipped >= state.settings.optimizer.most_skipped:
            self._stop_skipping()
        if job.phase == "ended":
            self.end_early()
        if job.phase == "finished":
            if (wrong := difference(state.digests)) is not None:
                self.stop_wrong_weights(f"{wrong} at the end")
                return
            state.lifecycle.finish(state.digests, int(state.saving.failed or state.storing.failed_last))

    def finish_early(self, name: str, code: int) -> None:
        """Ends the job after a signal. Finishes the step and saves a checkpoint first, if END_SECONDS are enough."""
        state = self._state
        if state.lifecycle.over or not state.ending.request(name, code):
            return
        if state.job.phase in ("starting", "lost") or state.settings.emulate.mode:
            self.end_early()
            return
        state.recorder.event(EndingEvent(signal=name))
        for rank in state.roster:
            rank.send(EndsSoon())
        self.drive(EndRequested())
        state.timers.after(END_SECONDS, self.end_early)

    def end_early(self) -> None:
        """Ends the job now, because of the signal."""
        state = self._state
        if not state.lifecycle.over:
            state.lifecycle.stop(state.ending.reason(state.saving.newest()), state.ending.code)

    def stop_wrong_weights(self, wrong: str) -> None:
        """Stops the job because weights that must be equal differ. wrong: the difference, in words."""
        newest = self._state.saving.newest()
        kept = f"run.resume=true continues from {newest}, saved earlier" if newest else "there is no earlier checkpoint"
        self._state.lifecycle.stop(
            f"{wrong}. This is probably a hardware fault, and the job must not continue with wrong weights; {kept}"
        )

    def _stop_skipping(self) -> None:
        newest, most = self._state.saving.newest(), self._state.settings.optimizer.most_skipped
        self._state.lifecycle.stop(
            f"the updates of {self._state.job.skipped} steps in a row were skipped, because a gradient was NaN or "
            f"infinite (optimizer.most_skipped={most}); "
            + (f"the newest checkpoint is {newest}" if newest else "there is no checkpoint yet")
        )
