"""Does the work that follows a commit: updates the profile, and tracks the checkpoint until it is saved or fails.

after_commit = AfterCommit(state, driver)     # a handler of the job's events
after_commit.saved(rank, message)             # a part is written; also `save_failed`, `compare`, `assembling`, ...
after_commit.uploaded(rank, message)          # parts are in the store; also `upload_failed`, `sealed`
after_commit.died(rank)                       # stops waiting for this worker's part of a checkpoint
after_commit.report_damage(damaged)           # records damaged checkpoints
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from recycle_pp.protocol.events import Event, Json, Outcome, Send
from recycle_pp.telemetry.events.checkpoints import (
    CheckpointDamaged,
    CheckpointFailed,
    CheckpointNotStored,
    CheckpointSaved,
    CheckpointSkipped,
    CheckpointStored,
)
from recycle_pp.telemetry.events.job import UpdateSkipped
from recycle_pp.wire.messages.members import Member
from recycle_pp.wire.messages.saving import (
    Assembled,
    Assembling,
    Digests,
    Saved,
    SaveFailed,
    Sealed,
    Uploaded,
    UploadFailed,
)
from recycle_pp.wire.messages.steps import Commit

from .driver import Driver
from .ranks import Rank
from .state import JobState


class AfterCommit:
    def __init__(self, state: JobState, driver: Driver) -> None:
        self._state = state
        self._driver = driver
        self._placed = False  # whether the job was checked for units with all copies on one host

    def handled(self, event: Event, outcome: Outcome) -> None:
        for note in outcome.notes:
            match note["event"]:
                case "committed":
                    self._committed(note)
                case "plan_adopted" if not self._placed:  # only once, at the start
                    self._placed = True
                    if warning := self._state.job.units.on_one_host():
                        self._state.recorder.say(warning)
                case "evaluated":
                    self._state.storing.validated(note["step"] + 1, note["val_loss"])
                case "mismatch":  # the unfinished checkpoint may contain wrong state
                    self._abandon(self._state.job.committed + 1, f"the state of worker {note['worker']} is wrong")
                case "violation":
                    self._state.lifecycle.stop(note["detail"])

    def _committed(self, note: Json) -> None:
        state = self._state
        commit = note["commit"]
        state.ending.committed(bool(commit.savers), note["skipped"])
        if commit.skipped:
            self._record_skipped(commit)
        self._measure(commit.step)
        if note["skipped"]:
            by, (newest, seconds) = state.saving.slow(), state.saving.unsaved()
            state.recorder.event(
                CheckpointSkipped(checkpoint=commit.step + 1, by=by, newest=newest, unsaved_seconds=seconds)
            )
        if commit.savers and not state.settings.emulate.mode:
            self.begin_saving(commit, state.job.live)
        self._driver.change(state.profile.problem(state.job.problem))  # last, because it may end the job

    def _record_skipped(self, commit: Commit) -> None:
        """Records that an update was skipped, because a gradient was not finite. After optimizer.most_skipped such
        updates in a row the job stops. An unfinished checkpoint may delay this, for control.lease seconds at most."""
        state = self._state
        state.recorder.event(UpdateSkipped(in_a_row=commit.skipped))
        if commit.skipped == state.settings.optimizer.most_skipped and state.saving.busy:
            state.timers.after(state.settings.control.lease, self._abandon_slow_save, state.saving.step)

    def _measure(self, step: int) -> None:
        """Adds the spans of a committed step to the profile, and writes the profile if it has learned something."""
        state = self._state
        before = state.profile.learned
        changed = state.profile.add(state.spans.of(step), state.job.problem_now().recomputes)
        if state.profile.learned != before:
            state.run.later(state.run.write_json, state.run.profile, state.profile.to_json())
        for worker, factor, against in changed:
            state.recorder.speed_changed(worker, factor, against)
        state.spans.drop(step - 2)

    # -- checkpoints -------------------------------------------------------------------------------------------

    def begin_saving(self, commit: Commit, live: Collection[Member]) -> None:
        """Expects the parts of a commit's checkpoint. The run's last checkpoint must be complete within control.lease.

        live: members that send digests"""
        outer, step = None if commit.outer is None else commit.outer.state, commit.step + 1
        self._state.saving.begin(step, commit.savers, commit.last, live, outer)
        if commit.last:
            self._state.timers.after(self._state.settings.control.lease, self._abandon_slow_save, step)

    def saved(self, rank: Rank, message: Saved) -> None:
        self._driver.send(self._state.saving.saved(rank.number, message))

    def compare(self, rank: Rank, message: Digests) -> None:
        """Adds a worker's digests for a checkpoint. The checkpoint is assembled only if the digests within each
        stage agree."""
        self._driver.send(self._state.saving.compared(rank.number, message))
        self._judge_replicas()

    def assembling(self, rank: Rank, message: Assembling) -> None:
        self._state.saving.assembling(rank.number, message)

    def assembled(self, rank: Rank, message: Assembled) -> None:
        state = self._state
        state.saving.assembled(message)
        if state.lifecycle.over:  # no event may follow the one with the reason for the stop
            return
        if message.whole:
            state.ending.saved()
            state.recorder.event(CheckpointSaved(checkpoint=message.step))
        if state.settings.checkpoint.store is not None:
            self.store(message, state.saving.final and state.saving.step == message.step)
        self._driver.finish_if_done()

    def save_failed(self, rank: Rank | None, message: SaveFailed) -> None:
        """Abandons a checkpoint. rank: sender of the message, or None for this coordinator."""
        state = self._state
        if state.saving.save_failed(message, rank.number if rank else None) and not state.lifecycle.over:
            newest, seconds = state.saving.unsaved()
            state.recorder.event(
                CheckpointFailed(checkpoint=message.step, detail=message.detail, newest=newest, unsaved_seconds=seconds)
            )
        self._driver.finish_if_done()

    def died(self, rank: Rank) -> None:
        """Stops waiting for a dead worker's part of a checkpoint and for its digests."""
        self._driver.send(self._state.saving.died(rank.number, self._state.job.live))
        self._judge_replicas()
        self._request(self._state.storing.died(rank.number, self._state.job.live))

    # -- the store ---------------------------------------------------------------------------------------------

    def store(self, message: Assembled, last: bool) -> None:
        """Begins to upload a checkpoint. If an earlier one is still being uploaded, this one is not stored. But the
        last checkpoint of the run is always stored, and cancels the earlier upload."""
        state, storing = self._state, self._state.storing
        if message.step <= (storing.step if storing.busy else storing.newest):
            return  # not a new checkpoint: its assembler has resent the message
        final = last or message.step >= state.settings.run.steps
        if storing.busy and not final:
            self._not_stored(message.step, f"checkpoint step-{storing.step:06d} is still being uploaded")
            return
        live, writers = state.job.live, state.saving.writers
        self._request(storing.begin(message.step, message.parts, message.whole, final, live, message.outer, writers))
        if final:
            seconds = state.settings.control.lease
            state.timers.after(seconds, self._abandon_slow_upload, message.step)
            left = seconds if state.ending.left is None else min(seconds, state.ending.left)
            state.recorder.say(f"the job ends when its last checkpoint is in the store, or after {left:.0f} s")

    def uploaded(self, rank: Rank, message: Uploaded) -> None:
        self._driver.send(self._state.storing.uploaded(rank.number, message))

    def sealed(self, rank: Rank, message: Sealed) -> None:
        state = self._state
        state.saving.stored(message.step)
        seconds = state.storing.sealed(message)
        if seconds is not None and not state.lifecycle.over:
            state.ending.saved()
            state.recorder.event(CheckpointStored(checkpoint=message.step, seconds=round(seconds, 3)))
        self._driver.finish_if_done()

    def upload_failed(self, rank: Rank | None, message: UploadFailed) -> None:
        """Abandons the upload of a checkpoint. rank: sender of the message, or None for this coordinator."""
        if self._state.storing.failed(message) and not self._state.lifecycle.over:
            self._not_stored(message.step, message.detail)
        self._driver.finish_if_done()

    def _request(self, requests: list[Send] | None) -> None:
        if requests is None:
            detail = "a node was lost before it had uploaded its part"
            self.upload_failed(None, UploadFailed(self._state.storing.step, detail))
        else:
            self._driver.send(requests)

    def _abandon_slow_upload(self, step: int) -> None:
        seconds = self._state.settings.control.lease
        self.upload_failed(None, UploadFailed(step, f"the upload was not complete within {seconds:g} s"))

    def _not_stored(self, step: int, detail: str) -> None:
        newest, seconds = self._state.storing.unsaved()
        self._state.recorder.event(
            CheckpointNotStored(checkpoint=step, detail=detail, newest=newest, unsaved_seconds=seconds)
        )

    # -- damage ------------------------------------------------------------------------------------------------

    def report_damage(self, damaged: Mapping[int, str]) -> None:
        """Records damaged checkpoints. damaged: number of steps in the checkpoint -> description of the damage."""
        for step, damage in damaged.items():
            self._state.recorder.event(CheckpointDamaged(checkpoint=step, detail=damage))

    def _judge_replicas(self) -> None:
        saving = self._state.saving
        wrong = saving.replicas.verdict()
        if wrong is None:
            return
        if self._state.job.third and not saving.final:  # continue, because the next vote identifies the wrong worker
            self._abandon(saving.step, wrong)
        else:
            self._driver.stop_wrong_weights(wrong)

    def _abandon_slow_save(self, step: int) -> None:
        """Abandons a checkpoint that takes too long, so that a hanging file system cannot delay the end."""
        saving, seconds = self._state.saving, self._state.settings.control.lease
        if saving.busy:
            self._abandon(step, f"{saving.slow()} did not finish writing within {seconds:g} s")

    def _abandon(self, step: int, why: str) -> None:
        self.save_failed(None, SaveFailed(step, why))
