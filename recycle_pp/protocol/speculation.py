"""Decides whether workers may apply a step before its commit (`optimizer.stagger`), and whether they must undo it.

speculation = Speculation(wanted=True)
speculation.allowed                    # whether workers may apply steps early now
speculation.pause()                    # workers must not apply the next step early
void = speculation.decided(scale)      # whether workers must undo their early update, because the committed one differs
"""

from __future__ import annotations

PAUSE = 8  # steps without speculation after an early update was rolled back


class Speculation:
    def __init__(self, wanted: bool) -> None:
        self._wanted, self._pause = wanted, 0

    @property
    def allowed(self) -> bool:
        return self._wanted and self._pause == 0

    def pause(self) -> None:
        """Makes workers wait for the next commit, because the layers of the stages change after it."""
        self._pause = max(self._pause, 1)

    def resume(self, allowed: bool) -> None:
        """Continues the job of another coordinator. allowed: the value of `stagger` in the newest commit."""
        self._pause = 0 if allowed else PAUSE

    def decided(self, scale: float | None) -> bool:
        """Whether early updates are void, because the committed update is clipped or skipped."""
        void = self.allowed and scale != 1.0
        self._pause = PAUSE if void else max(0, self._pause - 1)
        return void
