"""Broken links between live workers: they are rebuilt, or one of the two workers leaves.

links = BrokenLinks(state, driver, deaths, returns)
links.broken(rank, message)             # a connection broke: all links are rebuilt after a moment
links.unreachable(rank, message)        # attempts to connect have failed for control.suspicion: the link is cut
"""

from __future__ import annotations

from recycle_schedules import Worker

from recycle_pp.protocol.events import LinksBroken
from recycle_pp.protocol.partition_resolution import give_up
from recycle_pp.wire.messages.generations import Broken, Unreachable
from recycle_pp.wire.messages.members import Member

from .deaths import Deaths
from .driver import Driver
from .ranks import Rank
from .returns import Returns
from .state import JobState

_BROKEN_SECONDS = 0.5  # delay until links are rebuilt, if no worker has died
_OTHER_END_SECONDS = 0.3  # from the first report of a cut link to the decision; the link's other end reports too


class BrokenLinks:
    def __init__(self, state: JobState, driver: Driver, deaths: Deaths, returns: Returns) -> None:
        self._state = state
        self._driver = driver
        self._deaths = deaths
        self._returns = returns
        self._unreachable: dict[Member, list[Member]] = {}  # reporting member -> members that it cannot reach
        self._announced: dict[Worker, list[Worker]] = {}  # the cut links that have been reported to the user

    def broken(self, rank: Rank, message: Broken) -> None:
        self._state.timers.after(_BROKEN_SECONDS, self._renew, message.generation)

    def unreachable(self, rank: Rank, message: Unreachable) -> None:
        if not self._unreachable:
            self._state.timers.after(_OTHER_END_SECONDS, self._decide)
        self._unreachable[rank.number] = message.members

    def _renew(self, generation: int) -> None:
        """Rebuilds the links of the same members, unless a death or a decision has started another generation."""
        if generation == self._state.job.generation:
            self._driver.drive(LinksBroken())

    def _decide(self) -> None:
        """Removes the fewest workers that leave no cut link. If a stage would lose its last worker, the job waits for
        the network instead."""
        live = self._state.job.workers
        cut = {live[m]: [live[o] for o in others if o in live] for m, others in self._unreachable.items() if m in live}
        cut = {worker: others for worker, others in cut.items() if others}
        self._unreachable = {}
        if self._state.lifecycle.over or not cut:
            return
        lost = give_up(cut, live.values())
        for rank in self._state.roster:
            if rank.role in lost and rank.alive:
                self._deaths.end(rank, "node_loss", "the network between it and other workers is broken")
                self._returns.cut_off(rank, self._hosts_behind(rank.role, cut))
        if not lost and cut != self._announced:
            self._announced = cut
            worker, (other, *_) = min(cut.items())
            self._state.recorder.say(
                f"workers {worker} and {other} cannot connect to each other, and a stage would be lost with either; "
                "the job waits for the network between them"
            )

    def _hosts_behind(self, worker: Worker, cut: dict[Worker, list[Worker]]) -> list[str]:
        """The nodes at the other ends of this worker's cut links."""
        ends = {*cut.get(worker, []), *(other for other, those in cut.items() if worker in those)}
        return sorted({rank.host for rank in self._state.roster if rank.role in ends and rank.host})
