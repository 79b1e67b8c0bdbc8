"""A worker's part of a checkpoint.

    saving = StageSaving(settings, run_dir, stage, optimizer, batches, worker, send, strike)
    executor.on_commit.append(saving.committed)          # saves if the commit names this worker; digests if any
    session.assemble = saving.assemble               # puts the parts of all stages together

Runs beside training: the state is copied at the commit, threads of their own write it. So are the parameters of all who
do not save, for their digests: the coordinator compares them, and no checkpoint is finished before. Of sharded state it
compares the moments, too, by checksums.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path

from recycle_schedules import Worker
from torch import Tensor

from recycle_pp.config.settings import Settings
from recycle_pp.data.batches import Batches
from recycle_pp.model.stage import Stage, digests
from recycle_pp.numerics.gradients import Reduced
from recycle_pp.numerics.optimizer import StageOptimizer
from recycle_pp.numerics.shards import ShardedOptimizer
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
from .rejoin import Strike


class StageSaving:
    def __init__(
        self,
        settings: Settings,
        run_dir: str,
        stage: Stage,
        optimizer: StageOptimizer | ShardedOptimizer,
        batches: Batches,
        worker: Worker,
        send: Callable[[Message], None],
        strike: Strike,
    ) -> None:
        self._settings, self._stage, self._optimizer = settings, stage, optimizer
        self._batches, self._worker, self._send, self._strike = batches, worker, send, strike
        self._folder = Path(run_dir) / "checkpoints"
        self._saver = checkpoint.Saver(self._folder)
        self._lock = threading.Lock()
        self._done = 0  # steps in the parameters
        self._wanted = -1  # a checkpoint that was asked for

    def committed(self, commit: Commit, reduced: Reduced) -> None:
        with self._lock:
            self._done = commit.step + 1
            wanted = self._wanted == self._done
        named = self._worker in commit.savers
        if self._settings.emulate.mode:
            return
        if commit.savers:
            try:
                arguments = (commit.step + 1, self._copied(), self._checksums())
            except RuntimeError as error:
                self._refuse(commit.step + 1, error)
                return
            threading.Thread(target=self._digest, args=arguments, name="digests", daemon=True).start()
        if named or wanted:
            self._save(commit.step + 1, commit.last or wanted, whole=wanted)

    def asked(self, message: Save) -> None:
        """The end of the job: a saver died, this worker takes its part over. No step follows that changes the state,
        but the executor may still have to apply the last one."""
        with self._lock:
            self._wanted = message.step
            if self._done < self._wanted:
                return
        try:
            self._checksums()  # what has changed since the commit no other copy may be there to tell of
        except RuntimeError as error:
            self._refuse(message.step, error)
        else:
            self._save(message.step, last=True, whole=True)

    def assemble(self, message: Assemble) -> None:
        self._send(Assembling(message.step))
        threading.Thread(target=self._assemble, args=(message,), name="assemble", daemon=True).start()

    def _refuse(self, step: int, error: RuntimeError) -> None:
        self._send(SaveFailed(step, f"worker {self._worker}: {error}"))

    def _save(self, step: int, last: bool, whole: bool) -> None:
        """whole: all that this worker holds, and not only what it speaks for."""
        if self._saver.busy and not last:  # only the last one of a job is worth a second copy
            detail = f"worker {self._worker} still writes its part of the one before"
            self._send(SaveFailed(step, detail))
            return
        part = self._worker if self._settings.parallel.copies else self._worker.stage
        saving = self._saver.save(step, part, self._mine(whole), self._together())
        self._strike("checkpoint", step - 1)  # while the part is written, and before anybody is told
        threading.Thread(target=self._report, args=(step, saving, whole), name="saved", daemon=True).start()

    def _mine(self, whole: bool) -> dict[str, Tensor]:
        if isinstance(self._optimizer, ShardedOptimizer):
            return self._optimizer.pieces(whole)
        state = self._optimizer.state().items()
        return {key: tensor for key, tensor in state if not self._stage.borrows(key.partition(".")[2])}

    def _together(self) -> list[str]:
        return self._optimizer.tensors if isinstance(self._optimizer, ShardedOptimizer) else []

    def _copied(self) -> dict[str, Tensor]:
        return self._optimizer.copied() if isinstance(self._optimizer, ShardedOptimizer) else self._stage.copied()

    def _checksums(self) -> dict[str, str]:
        return self._optimizer.checksums() if isinstance(self._optimizer, ShardedOptimizer) else {}

    def _digest(self, step: int, parameters: Mapping[str, Tensor], checksums: Mapping[str, str]) -> None:
        self._send(Digests(step, {**digests(parameters), **checksums}))

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
