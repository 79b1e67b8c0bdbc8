"""Records events about understudies (`protocol.understudies`), and adapts the coordinator when one takes over.

understudies = Understudies(state)      # a handler of the job's events
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from recycle_pp.protocol.events import Event, Json, Outcome
from recycle_pp.telemetry.events.understudies import (
    TookOver,
    UnderstudyBegins,
    UnderstudyDismissed,
    UnderstudyInStep,
    UnderstudyRefused,
)
from recycle_pp.wire.messages.members import Member

from .state import JobState


@dataclass
class Waits:
    """The waits of commits for one understudy.

    begun    time.monotonic() when the member became an understudy
    in_step  whether the understudy is in step (`protocol.understudies`), so that commits wait for it
    steps    number of commits while it has been in step
    seconds  total time for which these commits waited
    """

    begun: float
    in_step: bool = False
    steps: int = 0
    seconds: float = 0.0

    @property
    def mean(self) -> float:
        return self.seconds / max(1, self.steps)


class Understudies:
    def __init__(self, state: JobState) -> None:
        self._state = state
        self._waits: dict[Member, Waits] = {}
        self._since: float | None = None  # time when the next commit began to wait for an understudy; None: no wait

    def handled(self, event: Event, outcome: Outcome) -> None:
        recorder = self._state.recorder
        if outcome.expiry is not None and outcome.expiry.step is not None and self._since is None:
            self._since = time.monotonic()
        for note in outcome.notes:
            match note["event"]:
                case "understudy":
                    self._begins(note)
                case "understudy_in_step":
                    waits = self._waits.setdefault(note["member"], Waits(time.monotonic()))
                    waits.in_step, seconds = True, time.monotonic() - waits.begun
                    recorder.event(UnderstudyInStep(**_roles(note), seconds=seconds))
                case "understudy_kept":
                    self._waits[note["member"]] = Waits(time.monotonic(), in_step=True)
                case "understudy_dismissed":
                    waits = self._waits.pop(note["member"], Waits(0.0))
                    recorder.event(UnderstudyDismissed(**_roles(note), steps=waits.steps, step_seconds=waits.mean))
                case "understudy_refused":
                    recorder.event(
                        UnderstudyRefused(**_roles(note), needed_bytes=note["needed"], free_bytes=note["free"])
                    )
                case "took_over":
                    self._takes_over(note)
                case "committed":
                    self._committed()
                case "announced":
                    self._since = None

    def _begins(self, note: Json) -> None:
        self._waits[note["member"]] = Waits(time.monotonic())
        link = self._state.profile.links.between(note["worker"], note["role"])
        gradient = 4 * note["elements"]
        self._state.recorder.event(
            UnderstudyBegins(
                **_roles(note),
                bytes=3 * gradient,
                step_bytes=gradient,
                step_seconds=None if link is None else gradient / link.bandwidth,
            )
        )

    def _committed(self) -> None:
        waited, self._since = 0.0 if self._since is None else time.monotonic() - self._since, None
        present = self._state.job.followers.understudies
        self._waits = {member: waits for member, waits in self._waits.items() if member in present}
        for waits in self._waits.values():
            if waits.in_step:
                waits.steps += 1
                waits.seconds += waited

    def _takes_over(self, note: Json) -> None:
        """Records that an understudy now plays a dead worker. Abandons the current checkpoint, because its parts belong
        to the old roles, and moves the worker to the understudy's machine in the profile."""
        state, rank = self._state, self._state.roster[note["member"]]
        state.saving.abandon()
        state.profile.place(note["worker"], rank.machine, rank.cores)
        waits = self._waits.pop(note["member"], Waits(0.0))
        state.recorder.event(TookOver(**_roles(note), steps=waits.steps, step_seconds=waits.mean))


def _roles(note: Json) -> Json:
    return {"worker": str(note["worker"]), "understudy": str(note["role"])}
