"""A worker's part of a checkpoint.

    saving = StageSaving(settings, run_dir, stage, optimizer, batches, participant, send, strike)
    executor.on_commit.append(saving.committed)          # saves if the commit names this worker; digests if any
    session.assemble = saving.assemble               # puts the parts of all stages together

Runs beside training: the state is copied at the commit, and threads of their own write it. Every worker also copies its
masters for their digests, which the coordinator compares before a checkpoint is finished. Units that are held one by
one have their moments compared too, by checksums.
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
from recycle_pp.wire.messages.table import Message
from recycle_pp.wire.messages.workers import (
    Assemble,
    Assembled,
    Assembling,
    Commit,
    Digests,
    Save,
    Saved,
    SaveFailed,
)

from . import checkpoint
from .follow import Strike
from .pieces import pieces, tensors_of


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
        strike: Strike,
    ) -> None:
        self._settings, self._stage, self._optimizer = settings, stage, optimizer
        self._batches, self._send, self._strike = batches, send, strike
        self._worker, self._holdings = participant.worker, participant.holdings
        self._folder = Path(run_dir) / "checkpoints"
        self._saver = checkpoint.Saver(self._folder)
        self._lock = threading.Lock()
        self._done = 0  # steps in the parameters
        self._wanted = -1  # a checkpoint that was asked for

    def committed(self, commit: Commit, reduced: Reduced) -> None:
        with self._lock:
            self._done = commit.step + 1
            wanted = self._wanted == self._done
        mine = self._holdings.saves.pop(commit.step, [])
        if self._settings.emulate.mode:
            return
        if commit.savers:
            try:
                arguments = (commit.step + 1, self._masters(commit.last), self._optimizer.checksums())
            except RuntimeError as error:
                self._refuse(commit.step + 1, error)
                return
            threading.Thread(target=self._digest, args=arguments, name="digests", daemon=True).start()
        if self._worker in commit.savers or wanted:
            self._save(commit.step + 1, commit.last or wanted, None if wanted else mine)

    def asked(self, message: Save) -> None:
        """The end of the job: a saver died, this worker takes its part over. No step follows that changes the state,
        but the executor may still have to apply the last one."""
        with self._lock:
            self._wanted = message.step
            if self._done < self._wanted:
                return
        try:
            self._optimizer.checksums()  # no other copy may be left that shows a change since the commit
        except RuntimeError as error:
            self._refuse(message.step, error)
        else:
            self._save(message.step, last=True, units=None)

    def assemble(self, message: Assemble) -> None:
        self._send(Assembling(message.step))
        threading.Thread(target=self._assemble, args=(message,), name="assemble", daemon=True).start()

    def _refuse(self, step: int, error: RuntimeError) -> None:
        self._send(SaveFailed(step, f"worker {self._worker}: {error}"))

    def _save(self, step: int, last: bool, units: Collection[int] | None) -> None:
        """units: None: all that this worker holds."""
        if self._saver.busy and not last:  # only the last one of a job is worth a second copy
            detail = f"worker {self._worker} still writes its part of the one before"
            self._send(SaveFailed(step, detail))
            return
        part = f"{self._worker.stage}-{self._worker.pipeline}"
        state = pieces(self._optimizer, self._stage, self._optimizer.held if units is None else units)
        saving = self._saver.save(step, part, state, tensors_of(self._stage), final=last)
        self._strike("checkpoint", step - 1)  # while the part is written, before the coordinator hears of it
        arguments = (step, saving, units is None)
        threading.Thread(target=self._report, args=arguments, name="saved", daemon=True).start()

    def _masters(self, final: bool) -> dict[str, Tensor]:
        """The masters that are held here, by name, on the CPU; copies unless they are final."""
        if self._settings.parallel.copies:
            names = self._stage.layout.unit_names
            masters = {names[unit]: self._optimizer.vectors(unit)[0] for unit in sorted(self._optimizer.held)}
        else:
            masters = dict(self._stage.masters())
        return {name: master.to("cpu", copy=not final) for name, master in masters.items()}

    def _digest(self, step: int, masters: Mapping[str, Tensor], checksums: Mapping[int, int]) -> None:
        names = self._stage.layout.unit_names
        states = {f"state of {names[unit]}": str(checksum) for unit, checksum in checksums.items()}
        self._send(Digests(step, digests(masters) | states))

    def _report(self, step: int, saving: Future[str], whole: bool) -> None:
        try:
            part = saving.result()
        except RuntimeError as error:
            self._send(SaveFailed(step, str(error)))
        else:
            self._send(Saved(step, whole, part))

    def _assemble(self, message: Assemble) -> None:
        step = message.step
        about = checkpoint.describe(self._settings, self._batches.fingerprint)
        try:
            checkpoint.finish(self._folder, step, message.parts, about)
            checkpoint.prune(self._folder, self._settings.checkpoint.keep)
        except Exception as error:  # whatever ails a checkpoint, training goes on
            self._send(SaveFailed(step, str(error) or type(error).__name__))
        else:
            self._send(Assembled(step))
