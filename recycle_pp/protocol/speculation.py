"""Whether workers may apply a step before it is agreed (`optimizer.stagger`), and whether they have to take it back.

speculation = Speculation(wanted=True)
speculation.allowed                    # now
void = speculation.decided(scale)      # the update is another one than they have done: they take it back
"""

from __future__ import annotations

PAUSE = 8  # steps without speculation after one was taken back


class Speculation:
    def __init__(self, wanted: bool) -> None:
        self._wanted, self._pause = wanted, 0

    @property
    def allowed(self) -> bool:
        return self._wanted and self._pause == 0

    def resume(self, allowed: bool) -> None:
        """In the place of a coordinator whose newest commit said so."""
        self._pause = 0 if allowed else PAUSE

    def decided(self, scale: float | None) -> bool:
        """Of a step that is agreed: only an update that is neither clipped nor skipped is what they have done."""
        void = self.allowed and scale != 1.0
        self._pause = PAUSE if void else max(0, self._pause - 1)
        return void
