"""Workers on their way back: who gives them the state, and when they can take part.

joiners.add(worker, earliest=40)
joiners.find_donors(live, committed)       # messages to those who are to give their state
joiners.synced(worker, step, session)      # its parameters are those after `step`, as that donor gave them
joiners.about_to_join(committed)           # lack only the step that has just been agreed: wait for them
joiners.take_ready(committed)              # lack nothing: members from now on
joiners.take_due(committed)                # are to be members with nothing: of sharded state
joiners.drop_late(committed)               # were waited for and did not come: they begin anew with another donor
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from recycle_schedules import Worker

LEAD = 3  # steps before `earliest` in which a joiner begins to catch up


@dataclass
class Joiner:
    earliest: int  # step from which it may take part
    donor: Worker | None = None
    synced: int | None = None  # newest step in its parameters, None while the state is on its way
    session: int = 0


@dataclass
class Joiners:
    _by_worker: dict[Worker, Joiner] = field(default_factory=dict)

    def add(self, worker: Worker, earliest: int) -> None:
        self._by_worker[worker] = Joiner(earliest)

    def __contains__(self, worker: Worker) -> bool:
        return worker in self._by_worker

    def died(self, worker: Worker) -> None:
        """A joiner, or a donor: then its joiners need another one and begin anew."""
        self._by_worker.pop(worker, None)
        for joiner in self._by_worker.values():
            if joiner.donor == worker:
                joiner.donor, joiner.synced = None, None

    def find_donors(self, live: Collection[Worker], committed: int) -> list[tuple[Worker, Worker, int]]:
        """(donor, joiner, session) for every joiner that needs one now: the live peer that serves the fewest."""
        found = []
        for worker, joiner in sorted(self._by_worker.items()):
            peers = sorted(w for w in live if w.stage == worker.stage)
            if joiner.donor is None and peers and committed + LEAD >= joiner.earliest:
                serving = [j.donor for j in self._by_worker.values()]
                joiner.donor = min(peers, key=serving.count)
                joiner.session += 1
                found.append((joiner.donor, worker, joiner.session))
        return found

    def synced(self, worker: Worker, step: int, session: int) -> bool:
        """False if it is no joiner (any more), or has that from a donor who is not its donor any more: then nobody
        gives it the next step."""
        joiner = self._by_worker.get(worker)
        if joiner is None or joiner.donor is None or joiner.session != session:
            return False
        joiner.synced = step
        return True

    def about_to_join(self, committed: int) -> bool:
        return bool(self._late(committed))

    def take_ready(self, committed: int) -> list[Worker]:
        ready = [w for w, j in self._by_worker.items() if j.synced == committed and j.earliest <= committed + 1]
        for worker in ready:
            del self._by_worker[worker]
        return sorted(ready)

    def take_due(self, committed: int) -> list[Worker]:
        """Those who may take part now, whatever they have: of sharded state, members get it from each other."""
        due = [w for w, j in self._by_worker.items() if j.earliest <= committed + 1]
        for worker in due:
            del self._by_worker[worker]
        return sorted(due)

    def drop_late(self, committed: int) -> None:
        for joiner in self._late(committed):
            joiner.donor, joiner.synced = None, None

    def _late(self, committed: int) -> list[Joiner]:
        return [j for j in self._by_worker.values() if j.synced == committed - 1 and j.earliest <= committed + 1]
