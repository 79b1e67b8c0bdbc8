"""Handles broken links between live workers: rebuilds the links, or removes one of the two workers.

links = BrokenLinks(state, driver, deaths, returns)
links.broken(rank, message)             # a connection broke; rebuilds all links after a short delay, or ends the worker
links.unreachable(rank, message)        # the worker could not connect to a peer for control.suspicion seconds
"""

from __future__ import annotations

from recycle_schedules import Worker

from recycle_pp.protocol.events import LinksBroken
from recycle_pp.protocol.partition_resolution import workers_to_evict
from recycle_pp.telemetry.events.recovery import LinkFailed, LinksCut
from recycle_pp.wire.messages.generations import Broken, Unreachable
from recycle_pp.wire.messages.members import Member

from .deaths import Deaths
from .driver import Driver
from .ranks import Rank
from .returns import Returns
from .state import JobState

RENEWALS = 3  # number of times that links are rebuilt in one step before a worker with a broken link is ended
_BROKEN_SECONDS = 0.5  # delay before links are rebuilt, unless a death is reported in this time
_OTHER_END_SECONDS = 0.3  # delay before the decision about a cut link, so that the link's other end can report too


class BrokenLinks:
    def __init__(self, state: JobState, driver: Driver, deaths: Deaths, returns: Returns) -> None:
        self._state = state
        self._driver = driver
        self._deaths = deaths
        self._returns = returns
        self._renewed = (-1, 0)  # step, number of renewals in this step
        self._unreachable: dict[Member, list[Member]] = {}  # reporting member -> members that it cannot reach
        # worker -> workers that it cannot reach, as last reported to the user; {} if a worker was removed since
        self._announced: dict[Worker, list[Worker]] = {}

    def broken(self, rank: Rank, message: Broken) -> None:
        self._state.timers.after(_BROKEN_SECONDS, self._renew, rank, message)

    def unreachable(self, rank: Rank, message: Unreachable) -> None:
        if not self._unreachable:
            self._state.timers.after(_OTHER_END_SECONDS, self._decide)
        self._unreachable[rank.number] = message.members

    def _renew(self, rank: Rank, message: Broken) -> None:
        """Rebuilds all links, unless another generation has started since the report. If links keep breaking in the
        same step, ends the worker that first reported the newest break, because a new process may help. The number of
        restarts is limited."""
        if message.generation != self._state.job.generation:
            return
        step = self._state.job.committed + 1
        before, times = self._renewed
        if before == step and times >= RENEWALS:
            self._renewed = -1, 0
            self._deaths.end(rank, "exception", f"its links failed {times + 1} times in step {step}: {message.reason}")
            return
        self._renewed = step, times + 1 if before == step else 1
        self._state.recorder.event(LinkFailed(worker=str(rank.role), reason=message.reason))
        self._driver.drive(LinksBroken())

    def _decide(self) -> None:
        """Removes the smallest set of workers that includes one end of each cut link. If that would empty a stage,
        the job waits for the network instead. Ignores links to silent nodes, which will soon be lost or send
        heartbeats again. Workers repeat their reports as long as a link is cut, so each report leads to a new
        decision."""
        silent = self._silent()
        live = {member: worker for member, worker in self._state.job.workers.items() if member not in silent}
        cut = {live[m]: [live[o] for o in others if o in live] for m, others in self._unreachable.items() if m in live}
        cut = {worker: others for worker, others in cut.items() if others}
        self._unreachable = {}
        if self._state.lifecycle.over or not cut:
            return
        lost = workers_to_evict(cut, self._state.job.workers.values())
        if lost or cut != self._announced:
            self._announced = {} if lost else cut
            pairs = sorted({(min(a, b), max(a, b)) for a, others in cut.items() for b in others})
            leaving = [str(worker) for worker in sorted(lost)]
            self._state.recorder.event(LinksCut(cut=[f"{a} {b}" for a, b in pairs], leaving=leaving))
        for rank in self._state.roster:
            if rank.role in lost and rank.alive:
                self._deaths.end(rank, "node_loss", "its links to other workers are cut")
                self._returns.cut_off(rank, self._hosts_behind(rank.role, cut))

    def _silent(self) -> set[Member]:
        """Members whose supervisors have sent no heartbeat for more than half of control.suspicion."""
        control = self._state.settings.control
        limit = control.suspicion / 2
        return {rank.number for rank in self._state.roster if rank.missed_heartbeats * control.heartbeat > limit}

    def _hosts_behind(self, worker: Worker, cut: dict[Worker, list[Worker]]) -> list[str]:
        """The hosts at the other ends of this worker's cut links."""
        ends = {*cut.get(worker, []), *(other for other, those in cut.items() if worker in those)}
        return sorted({rank.host for rank in self._state.roster if rank.role in ends and rank.host})
