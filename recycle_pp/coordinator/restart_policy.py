"""Decides which workers are restarted after a death.

restarts = RestartPolicy(settings)
restarts.faults_of(role)                    # injected faults for a new process
restarts.died(role, committed)              # drops the dead process's faults, so that they do not fire again
restarts.recast({old: new})                 # members have new roles; each keeps its `+rejoin_at`
restarts.replaced(rank)                     # a new node, with another GPU, has taken the rank
restarts.is_respawned(rank, death)          # whether to restart the worker: it failed by itself, and not too often
restarts.is_due(role); restarts.earliest(role)      # with `+rejoin_at`: whether the worker returns, and its first step
first = restarts.failed(where, role)        # another worker that died in the same op, or None; if any, stop the job
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from recycle_schedules import Worker

from recycle_pp.config.faults import Fault, faults
from recycle_pp.config.settings import Settings
from recycle_pp.wire.messages.supervisors import Death

from .ranks import NODE_LOSS, Rank

FINAL = ("node_loss", "eviction", "quarantine")  # causes after which the process is not restarted
REMEMBERED = 100  # limit on the number of remembered ops in which a worker died


class RestartPolicy:
    def __init__(self, settings: Settings) -> None:
        self.respawns = settings.run.respawns
        self._faults: list[Fault] = faults(settings)
        self._exceptions: dict[str, Worker] = {}  # op of a micro-batch -> the worker that died in it
        self._failed_gpus: set[int] = set()  # ranks whose GPU failed

    def faults_of(self, role: Worker) -> list[Fault]:
        return [f for f in self._faults if f.worker == role and f.kind != "rejoin"]

    def died(self, role: Worker, committed: int) -> None:
        self._faults = [f for f in self._faults if f.worker != role or f.step > committed + 1 or f.kind == "rejoin"]

    def recast(self, now: Mapping[Worker, Worker]) -> None:
        """Called when members get other roles. Each keeps its `+rejoin_at` in its new role.

        now  old role -> new role, of the same member
        """
        self._faults = [
            f._replace(worker=now.get(f.worker, f.worker)) if f.kind == "rejoin" else f for f in self._faults
        ]

    def taken_over(self, live: Collection[Worker], committed: int) -> None:
        """Called on a new coordinator. Drops the faults up to the step in progress, except the rejoins of workers that
        are not live."""
        self._faults = [
            f for f in self._faults if f.step > committed + 1 or (f.kind == "rejoin" and f.worker not in live)
        ]

    def is_respawned(self, rank: Rank, death: Death) -> bool:
        """Whether to restart a worker after this death. Call once per death. A worker is restarted after the first
        failure of its GPU, because most GPU errors end with the process. After a second failure it is not, because a
        third one would cost another recovery."""
        if death.injected or death.cause in FINAL or self.is_due(rank.role):
            return False
        if death.cause == "gpu":
            if rank.number in self._failed_gpus:
                return False
            self._failed_gpus.add(rank.number)
        return rank.supervisor is not None and rank.respawns < self.respawns

    def replaced(self, rank: Rank) -> None:
        """Called when a new node, with another GPU, has taken this rank."""
        self._failed_gpus.discard(rank.number)

    def will_return(self, rank: Rank) -> bool:
        """Whether to restart a dead worker whose supervisor has reconnected. True only if the worker counted as lost
        with its node or as hung, and no injected fault caused its death."""
        death = rank.causes.get(rank.died, NODE_LOSS)
        return death.cause in ("node_loss", "hang") and not death.injected

    def is_given_up(self, rank: Rank, death: Death) -> bool:
        """Whether the worker stays dead only because it has used up its restarts: `run.respawns` in total, and one
        after a failure of its GPU. Call after `is_respawned` has returned False."""
        restartable = not death.injected and death.cause not in FINAL
        return restartable and not self.is_due(rank.role) and (death.cause == "gpu" or rank.respawns >= self.respawns)

    def is_due(self, role: Worker) -> bool:
        return any(f.kind == "rejoin" and f.worker == role for f in self._faults)

    def earliest(self, role: Worker) -> int:
        """The first step in which a returning worker takes part; 0: any. Removes its `+rejoin_at`."""
        returns = [f for f in self._faults if f.kind == "rejoin" and f.worker == role]
        if not returns:
            return 0
        self._faults.remove(returns[0])
        return returns[0].step

    def has_failed(self, where: str) -> bool:
        """Whether an exception in this op has already killed a worker."""
        return where in self._exceptions

    def failed(self, where: str, role: Worker) -> Worker | None:
        first = self._exceptions.setdefault(where, role)
        for old in list(self._exceptions)[:-REMEMBERED]:
            del self._exceptions[old]
        return None if first == role else first
