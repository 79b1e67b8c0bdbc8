"""Time-based checkpoints, and the end of a job after a signal: finish the step, save a checkpoint, exit.

    ending = Ending(settings, recorder)
    ending.request("SIGTERM", 143)     # records the signal; False if an earlier one is recorded
    ending.save_due                    # whether checkpoint.minutes have passed, or a user has requested a checkpoint
    ending.committed(saves, skipped); ending.saved()      # measure steps and checkpoints
    ending.reason(saved_as)            # why the job ended, for the user

Some time after its signal, a launcher kills all remaining processes (torchrun: after 30 s). The user is warned as soon
as a step and a checkpoint together take longer than END_SECONDS.
"""

from __future__ import annotations

import time
from pathlib import Path

from recycle_pp.config.settings import Settings
from recycle_pp.telemetry.recorder import Recorder

END_SECONDS = 22.0  # time for the step and the checkpoint; torchrun kills after 30 s, and supervisors wait 24 s


class Ending:
    """Not thread-safe; runs in the coordinator's loop."""

    def __init__(self, settings: Settings, recorder: Recorder) -> None:
        self.minutes = settings.checkpoint.minutes
        self.save_asked = False  # whether a user has requested a checkpoint, and none has begun since
        self._emulated = bool(settings.emulate.mode)
        self._recorder = recorder
        self.signal: str | None = None  # name of the signal that ends the job
        self.code = 0
        self._signalled = 0.0
        self._saved = self._committed = self._due_since = time.monotonic()
        self._commits = 0
        self._step = 0.0
        self._save = 0.0
        self._warned = False

    def request(self, signal: str, code: int) -> bool:
        first = self.signal is None
        if first:
            self.signal = signal
            self.code = code
            self._signalled = time.monotonic()
        return first

    @property
    def left(self) -> float | None:
        """Seconds until the job ends at the latest; None without a signal."""
        return None if self.signal is None else max(0.0, self._signalled + END_SECONDS - time.monotonic())

    @property
    def save_due(self) -> bool:
        timed = 0 < 60 * self.minutes <= time.monotonic() - self._due_since and not self._emulated
        return timed or self.save_asked

    def committed(self, saves: bool, skipped: bool) -> None:
        """Measures the duration of a step. Ignores the first two steps of a job, because they are slow.

        saves    whether a checkpoint is saved after this step
        skipped  whether a checkpoint was due after this step, but was skipped because the previous one is unfinished.
                 The time of `checkpoint.minutes` then starts again
        """
        now = time.monotonic()
        before = self._committed
        self._committed = now
        self._commits += 1
        self._step = now - before if self._commits > 2 else 0.0
        if saves:
            self._saved = now
            self.save_asked = False
        if saves or skipped:
            self._due_since = now
        self._check()

    def saved(self) -> None:
        self._save = time.monotonic() - self._saved
        self._check()

    def reason(self, checkpoint: Path | str | None) -> str:
        """Why the job ended, for the user. checkpoint: the newest complete checkpoint."""
        if self._emulated:
            return f"{self.signal}"
        where = f"the newest checkpoint is {checkpoint}; run.resume=true continues from it" if checkpoint else (
            "there is no checkpoint yet"
        )  # fmt: skip
        return f"{self.signal}; {where}"

    def _check(self) -> None:
        if not self._warned and not self._emulated and self._step + self._save > END_SECONDS:
            self._warned = True
            self._recorder.say(
                f"a step takes {self._step:.0f} s and a checkpoint {self._save:.0f} s, together more than the "
                f"{END_SECONDS:.0f} s that a job has after a signal. After a signal the run would resume from an older "
                "checkpoint; a smaller checkpoint.every or checkpoint.minutes limits the lost work"
            )
