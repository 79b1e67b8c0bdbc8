"""What a death means: the job goes on at once, the cause follows, and with it whether the worker is started again.

deaths = Deaths(roster, restarts, recorder, timers, coordinator)
deaths.dead(rank, incarnation)                # whoever saw it first: its connection, its supervisor, the watch
deaths.explain(rank, incarnation)             # when the cause is known, or is not awaited any longer
deaths.end(rank, cause, detail)               # it is not dead, and has to be: nobody can reach it
deaths.end_stuck(rank, stuck)                 # likewise: it does not get on
deaths.respawn_due()                          # after a commit: those that `+rejoin_at` brings back
deaths.close()                                # the job ends: nobody is left without an event
"""

from __future__ import annotations

import time
from typing import Protocol

from recycle_schedules import Worker

from recycle_pp.protocol.liveness import Stuck
from recycle_pp.telemetry.recorder import Recorder
from recycle_pp.wire.messages.supervisors import Death

from .ranks import Rank
from .restart_policy import RestartPolicy
from .roster import Roster
from .timers import Timers

CAUSE_SECONDS = 0.3  # a death may be seen before its supervisor can say why: the event waits so long for the cause
HUNG_SECONDS = 3.0  # the same of one that is killed because it is stuck: it says where first
DYING_SECONDS = 60.0  # the same where its supervisor will say: when the kernel, or a GPU's driver, has cleaned up


class Survivor(Protocol):
    """The coordinator, as far as a death concerns it."""

    @property
    def over(self) -> bool: ...
    @property
    def committed(self) -> int: ...
    def go_on_without(self, worker: Worker) -> None: ...
    def spare_memory(self, worker: Worker) -> None: ...
    def stop(self, reason: str, code: int = 1) -> None: ...


class Deaths:
    def __init__(
        self,
        roster: Roster,
        restarts: RestartPolicy,
        recorder: Recorder,
        timers: Timers,
        survivor: Survivor,
    ) -> None:
        self._roster, self._restarts, self._recorder, self._timers = roster, restarts, recorder, timers
        self._survivor = survivor

    def dead(
        self, rank: Rank, incarnation: int, cause_seconds: float = CAUSE_SECONDS, stood: float | None = None
    ) -> None:
        """stood: for so long it had made no progress."""
        if incarnation != rank.incarnation or not rank.alive:
            return
        now = time.monotonic()
        rank.alive, rank.worker, rank.died = False, None, incarnation
        if self._survivor.over:
            return
        self._recorder.death(rank.role, now, stood)
        self._restarts.died(rank.role, self._survivor.committed)
        self._survivor.go_on_without(rank.role)
        self._timers.after(cause_seconds, self.explain, rank, incarnation)

    def end(self, rank: Rank, cause: str, detail: str) -> None:
        rank.causes[rank.incarnation] = Death(cause, detail)
        rank.kill()
        self.dead(rank, rank.incarnation)

    def end_stuck(self, rank: Rank, stuck: Stuck) -> None:
        """It is told to say where its threads stand, and killed; nobody waits for either."""
        rank.causes[rank.incarnation] = Death("hang", f"{stuck.where}, for {stuck.seconds:.1f} s")
        rank.kill(stacks=True)
        self.dead(rank, rank.incarnation, HUNG_SECONDS, stuck.seconds)

    def explain(self, rank: Rank, incarnation: int, recorded: bool = False) -> None:
        """A death's event, unless it is recorded; and what follows from its cause. Once a death."""
        if incarnation != rank.died or rank.explained >= incarnation or self._survivor.over:
            return
        if incarnation not in rank.causes and rank.supervisor is not None and rank.ended < incarnation and not recorded:
            # Only its connection broke, or its supervisor would have seen it die: it is ended, and begins anew.
            rank.ended = incarnation
            rank.kill()
            self._timers.after(DYING_SECONDS, self.explain, rank, incarnation)
            return
        rank.explained = incarnation
        death = rank.causes.get(incarnation, Death("node_loss", "its connection broke"))
        if not recorded:
            self._recorder.explain_death(rank.role, death)
        if death.where:
            first = self._restarts.failed(death.where, rank.role)
            if first is not None:
                self._survivor.stop(f"workers {first} and {rank.role} both failed in {death.where}:\n{death.detail}")
                return
        if death.cause == "out_of_memory":
            self._survivor.spare_memory(rank.role)
        if self._restarts.is_respawned(rank, death):
            rank.respawns += 1
            self._recorder.event("respawned", rank.role, respawns=rank.respawns)
            rank.spawn()
        elif self._restarts.is_given_up(rank, death) and not recorded:
            self._recorder.event("given_up", rank.role, respawns=rank.respawns)

    def respawn_due(self) -> None:
        """A worker that is to rejoin is started when it is dead, and waits for its step."""
        for rank in self._roster:
            if self._restarts.is_due(rank.role) and not rank.alive and rank.incarnation >= 0 and rank.supervisor:
                rank.spawn()

    def close(self) -> None:
        for rank in self._roster:
            if rank.explained < rank.died:
                rank.explained = rank.died
                unsaid = Death("unknown", "the job ended before its supervisor could say why")
                self._recorder.explain_death(rank.role, rank.causes.get(rank.died, unsaid))
