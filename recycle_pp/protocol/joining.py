"""Returning workers: their donors, and the commit at which they become members.

joiners.add(worker, earliest=40)
joiners.find_donors(live, committed, generation, sources)   # messages to the donors
joiners.synced(worker, step, session)      # records that the worker has all its units in the state after `step`
joiners.about_to_join(committed)           # whether some joiners lack only the newest step; if so, wait for them
joiners.take_ready(committed)              # the joiners that lack nothing; they become members
joiners.drop_late(committed)               # joiners that are still not ready restart with new donors
joiners.check(give)                        # restarts joiners if a donor no longer holds the units that it sends

A session is one attempt to bring a joiner up to date.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from recycle_schedules import Worker

from recycle_pp.wire.messages.units import UnitId

LEAD = 3  # a joiner starts to follow its units this many steps before `earliest`
SESSIONS = 1 << 20  # limit on the number of sessions in one generation

Sources = Callable[[Worker, Collection[Worker], Mapping[int, int]], dict[Worker, list[UnitId]]]
"""(joiner, live workers, pipeline -> number of joiners that it serves) -> (donor -> units): see `Units.sources`"""


class Donation(NamedTuple):
    """of: number of units that the joiner receives from all donors."""

    donor: Worker
    to: Worker
    session: int
    units: list[UnitId]
    of: int


@dataclass
class Joiner:
    earliest: int  # first step that the joiner may take part in
    donors: dict[Worker, list[UnitId]] = field(default_factory=dict)  # donor -> the units that it sends
    synced: int | None = None  # the joiner's units are in the state after this step; None until they have arrived
    session: int = -1

    def restart(self) -> None:
        self.donors, self.synced = {}, None


@dataclass
class Joiners:
    _by_worker: dict[Worker, Joiner] = field(default_factory=dict)
    _session: int = -1  # number of the newest session; increases, also after a change of the coordinator

    def add(self, worker: Worker, earliest: int) -> None:
        self._by_worker[worker] = Joiner(earliest)

    def __contains__(self, worker: Worker) -> bool:
        return worker in self._by_worker

    def died(self, worker: Worker) -> None:
        """Removes a dead joiner. If the worker was a donor, its joiners restart with other donors."""
        self._by_worker.pop(worker, None)
        for joiner in self._by_worker.values():
            if worker in joiner.donors:
                joiner.restart()

    def find_donors(
        self, live: Collection[Worker], committed: int, generation: int, sources: Sources
    ) -> list[Donation]:
        """New donations, for every joiner that needs donors now."""
        found: list[Donation] = []
        for worker, joiner in sorted(self._by_worker.items()):
            if joiner.donors or committed + LEAD < joiner.earliest:
                continue
            donors = [donor for j in self._by_worker.values() for donor in j.donors if donor.stage == worker.stage]
            serving = {donor.pipeline: donors.count(donor) for donor in donors}
            joiner.donors = sources(worker, live, serving)
            if joiner.donors:
                joiner.session = self._session = max(self._session + 1, generation * SESSIONS)
                of = sum(map(len, joiner.donors.values()))
                found += [Donation(donor, worker, joiner.session, units, of) for donor, units in joiner.donors.items()]
        return found

    def synced(self, worker: Worker, step: int, session: int) -> bool:
        """Records progress of a joiner. Returns False if the worker is no longer a joiner, or if the session is old:
        the donors of an old session do not send the next step."""
        joiner = self._by_worker.get(worker)
        if joiner is None or not joiner.donors or joiner.session != session:
            return False
        joiner.synced = step
        return True

    def check(self, give: Callable[[Mapping[Worker, Collection[UnitId]]], bool]) -> None:
        """give(donor -> units that it sends): whether all these donors still hold the units (`Units.give`)."""
        for joiner in self._by_worker.values():
            if joiner.donors and not give(joiner.donors):
                joiner.restart()

    def about_to_join(self, committed: int) -> bool:
        return bool(self._late(committed))

    def take_ready(self, committed: int) -> list[Worker]:
        ready = [w for w, j in self._by_worker.items() if j.synced == committed and j.earliest <= committed + 1]
        for worker in ready:
            del self._by_worker[worker]
        return sorted(ready)

    def drop_late(self, committed: int) -> None:
        for joiner in self._late(committed):
            joiner.restart()

    def _late(self, committed: int) -> list[Joiner]:
        return [j for j in self._by_worker.values() if j.synced == committed - 1 and j.earliest <= committed + 1]
