"""When a checkpoint is due by time, and how a job ends before its last step: a signal, the step, a checkpoint.

    ending = Ending(settings, say)
    ending.told("SIGTERM", 143)        # the job is to end; False where it was told before
    ending.save_due                    # checkpoint.minutes are over: the next commit brings a checkpoint
    ending.committed(saves, skipped); ending.saved()      # to measure both
    ending.reason(saved_as)            # in words

A launcher kills what has not ended a while after its signal (torchrun: 30 s). A job whose step and checkpoint take
longer than END_SECONDS is told so as soon as that is known; its newest complete checkpoint stays.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from recycle_pp.config.settings import Settings

END_SECONDS = 22.0  # for the step and the checkpoint; torchrun kills after 30, and supervisors wait 24


class Ending:
    """Not thread-safe: for the coordinator's loop. say: a sentence to the user."""

    def __init__(self, settings: Settings, say: Callable[[str], None]) -> None:
        self._minutes = settings.checkpoint.minutes
        self._emulated = bool(settings.emulate.mode)
        self._say = say
        self.signal: str | None = None  # that ends the job
        self.code = 0
        self._saved = self._committed = self._due_since = time.monotonic()
        self._commits = 0
        self._step = 0.0
        self._save = 0.0
        self._warned = False

    def told(self, signal: str, code: int) -> bool:
        first = self.signal is None
        if first:
            self.signal = signal
            self.code = code
        return first

    @property
    def save_due(self) -> bool:
        return 0 < 60 * self._minutes <= time.monotonic() - self._due_since and not self._emulated

    def committed(self, saves: bool, skipped: bool) -> None:
        """A step has ended; the first two of a job are slower than the others, and tell nothing. skipped: its
        checkpoint, as the one before is still written; the next one is due after as long again."""
        now = time.monotonic()
        before = self._committed
        self._committed = now
        self._commits += 1
        self._step = now - before if self._commits > 2 else 0.0
        if saves:
            self._saved = now
        if saves or skipped:
            self._due_since = now
        self._check()

    def saved(self) -> None:
        self._save = time.monotonic() - self._saved
        self._check()

    def reason(self, checkpoint: Path | None) -> str:
        """checkpoint: the newest complete one."""
        if self._emulated:
            return f"{self.signal}"
        where = f"the newest checkpoint is {checkpoint}; run.resume=true continues from it" if checkpoint else (
            "there is no checkpoint yet"
        )  # fmt: skip
        return f"{self.signal}; {where}"

    def _check(self) -> None:
        if not self._warned and not self._emulated and self._step + self._save > END_SECONDS:
            self._warned = True
            self._say(
                f"a step takes {self._step:.0f} s and a checkpoint {self._save:.0f} s, but after a signal a job "
                f"has {END_SECONDS:.0f} s; then the run resumes from an older checkpoint, so set checkpoint.every or "
                "checkpoint.minutes accordingly"
            )
