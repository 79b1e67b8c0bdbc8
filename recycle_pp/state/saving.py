"""Saves a worker's part of a checkpoint.

    saving = StageSaving(settings, run_dir, stage, optimizer, batches, participant, send, inject)
    executor.on_commit.append(saving.committed)          # saves or sends digests, if the commit requires it
    session.assemble = saving.assemble               # merges the parts of all stages

Training continues during a save, because threads write a copy of the state made at the commit. Every worker also
copies its parameters (with bf16, the float32 masters) and sends their digests. The coordinator compares the digests
before a checkpoint is finished. With sharded state, the coordinator also compares checksums of each unit's whole state.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from pathlib import Path

from torch import Tensor

from recycle_pp.config.settings import Settings
from recycle_pp.data.batches import Batches
from recycle_pp.model.stage import Stage, digests
from recycle_pp.numerics.gradients import Reduced
from recycle_pp.numerics.optimizer import StageOptimizer
from recycle_pp.protocol.participant import Participant
from recycle_pp.telemetry.best_checkpoint import best
from recycle_pp.telemetry.checkpoint_folders import finished
from recycle_pp.wire.messages.saving import Assemble, Assembled, Assembling, Digests, Save, Saved, SaveFailed
from recycle_pp.wire.messages.steps import Commit
from recycle_pp.wire.messages.table import Message

from . import checkpoint
from .checkpoint_tensors import pieces, tensors_of
from .follow import Inject


class StageSaving:
    def __init__(
        self,
        settings: Settings,
        run_dir: str,
        stage: Stage,
        optimizer: StageOptimizer,
        batches: Batches,
        participant: Participant,
        send: Callable[[Message], None],
        inject: Inject,
    ) -> None:
        self._settings, self._stage, self._optimizer = settings, stage, optimizer
        self._batches, self._send, self._inject = batches, send, inject
        self._member, self._worker, self._holdings = participant.member, participant.worker, participant.holdings
        self._folder = Path(run_dir) / "checkpoints"
        self._saver = checkpoint.Saver(self._folder)
        self._lock = threading.Lock()
        self._done = participant.applied + 1  # number of steps that the parameters include
        self._wanted = -1  # number of steps of the checkpoint that `asked` has requested; -1: none
        self._answer: Saved | SaveFailed | None = None  # the answer to this request, once it is known

    def committed(self, commit: Commit, reduced: Reduced) -> None:
        with self._lock:
            self._done = commit.step + 1
            wanted = self._wanted == self._done
        mine = [self._stage.layout.number(unit) for unit in self._holdings.saves.pop(commit.step, [])]
        if self._settings.emulate.mode:
            return
        if commit.savers:
            try:
                arguments = (commit.step + 1, self._masters(commit.last), self._checksums())
            except RuntimeError as error:
                self._refuse(commit.step + 1, error)
                return
            threading.Thread(target=self._digest, args=arguments, name="digests", daemon=True).start()
        if self._member in commit.savers or wanted:
            self._save(commit.step + 1, commit.last or wanted, None if wanted else mine, commit.in_use)

    def asked(self, message: Save) -> None:
        """Saves all units of this worker, because a saver died at the end of the job. If the executor has not applied
        the last step yet, `committed` saves them."""
        with self._lock:
            if message.step == self._wanted:  # a request repeated after a reset or by another coordinator
                if self._answer is not None:
                    self._send(self._answer)
                return
            self._wanted, self._answer = message.step, None
            if self._done < self._wanted:
                return
        try:
            self._optimizer.checksums()  # raises if the state is damaged; there may be no other copy to compare with
        except RuntimeError as error:
            with self._lock:
                self._answer = SaveFailed(message.step, f"worker {self._worker}: {error}")
            self._send(self._answer)
        else:
            self._save(message.step, last=True, units=None)

    def assemble(self, message: Assemble) -> None:
        self._send(Assembling(message.step))
        threading.Thread(target=self._assemble, args=(message,), name="assemble", daemon=True).start()

    def _refuse(self, step: int, error: RuntimeError) -> None:
        self._send(SaveFailed(step, f"worker {self._worker}: {error}"))

    def _save(
        self, step: int, last: bool, units: Collection[int] | None, in_use: Collection[int] | None = None
    ) -> None:
        """Saves this worker's part of the checkpoint of `step` steps, in threads.

        last    whether the state will never change again
        units   the units to save; None: all units of this worker
        in_use  see `Saver.save`
        """
        if self._saver.busy and not last:  # only the end of a job justifies a second copy in memory
            detail = f"worker {self._worker} is still writing its part of the previous checkpoint"
            self._send(SaveFailed(step, detail))
            return
        part = f"{self._worker.stage}-{self._worker.pipeline}"
        state = pieces(self._optimizer, self._stage, self._optimizer.held if units is None else units)
        saving = self._saver.save(step, part, state, tensors_of(self._stage), last, in_use)
        self._inject("checkpoint", step - 1)  # this fault fires while the part is being written
        arguments = (step, saving, units is None)
        threading.Thread(target=self._report, args=arguments, name="saved", daemon=True).start()

    def _masters(self, final: bool) -> dict[str, Tensor]:
        """Name -> master (float32 weights) on the CPU, for this worker's units.

        final: whether the state will never change again; if so, tensors on the CPU are not copied
        """
        if self._settings.parallel.copies:
            names = self._stage.layout.unit_names
            masters = {names[unit]: self._optimizer.vectors(unit)[0] for unit in sorted(self._optimizer.held)}
        else:
            masters = dict(self._stage.masters())
        return {name: master.to("cpu", copy=not final) for name, master in masters.items()}

    def _checksums(self) -> dict[str, str]:
        """The checksum of each unit's state, by name. Raises RuntimeError, see `StageOptimizer.checksums`."""
        names = self._stage.layout.unit_names
        return {f"state of {names[unit]}": str(checksum) for unit, checksum in self._optimizer.checksums().items()}

    def _digest(self, step: int, masters: Mapping[str, Tensor], checksums: Mapping[str, str]) -> None:
        """Sends the digests of the masters, and the checksums. Runs in a thread, and does not use the stage, because
        the stage's layers may change meanwhile."""
        self._send(Digests(step, {**digests(masters), **checksums}))

    def _report(self, step: int, saving: Future[str], whole: bool) -> None:
        answer: Saved | SaveFailed
        try:
            answer = Saved(step, whole, saving.result())
        except RuntimeError as error:
            answer = SaveFailed(step, str(error))
        if whole:
            with self._lock:
                self._answer = answer
        self._send(answer)

    def _assemble(self, message: Assemble) -> None:
        step = message.step
        about = checkpoint.describe(self._settings, self._batches.fingerprint, self._stage.module.origin)
        place = checkpoint.temporary(self._folder, step)
        # With a store, each node may keep its parts on its own disk. In that case some parts are missing here.
        whole = self._settings.checkpoint.store is None or all((place / part).is_dir() for part in message.parts)
        try:
            if whole:
                checkpoint.finish(self._folder, step, message.parts, about | checkpoint.position(message.outer))
                of = self._settings.checkpoint
                kept = best(self._folder.parent / "metrics.jsonl", finished(self._folder)) if of.keep_best else None
                checkpoint.prune(self._folder, step, of.keep, {kept, message.uploading})
        except Exception as error:  # a failed checkpoint must not stop training
            self._send(SaveFailed(step, str(error) or type(error).__name__))
        else:
            self._send(Assembled(step, whole, message.parts, message.outer))
