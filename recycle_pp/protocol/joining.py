"""Tracks joiners (returning processes): their donors, and the commit at which they become members.

joiners.add(member, earliest=40)
joiners.find_donors(committed, generation, sources)     # messages to the donors
joiners.synced(member, step, session)      # records that the member has all its units in the state after `step`
joiners.about_to_join(committed)           # whether some joiners lack only the newest step; if so, wait for them
joiners.take_ready(committed)              # the joiners that lack nothing; they become members
joiners.drop_late(committed)               # restarts joiners that are still not ready, with new donors
joiners.check(give)                        # restarts joiners if a donor no longer holds the units that it sends

A session is one attempt to bring a joiner up to date.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from recycle_pp.wire.messages.members import Member
from recycle_pp.wire.messages.units import UnitId

LEAD = 3  # a joiner starts to follow its units this many steps before `earliest`
SESSIONS = 1 << 20  # limit on the number of sessions in one generation

Sources = Callable[[Member, Mapping[Member, int]], dict[Member, list[UnitId]]]
"""(joiner, donor -> number of joiners that it serves) -> (donor -> units): see `Units.sources`"""


class Donation(NamedTuple):
    """of: number of units that the joiner receives from all donors."""

    donor: Member
    to: Member
    session: int
    units: list[UnitId]
    of: int


@dataclass
class Joiner:
    earliest: int  # first step that the joiner may take part in
    donors: dict[Member, list[UnitId]] = field(default_factory=dict)  # donor -> the units that it sends
    synced: int | None = None  # the joiner's units are in the state after this step; None until they have arrived
    session: int = -1

    def restart(self) -> None:
        self.donors, self.synced = {}, None


@dataclass
class Joiners:
    _by_member: dict[Member, Joiner] = field(default_factory=dict)
    _session: int = -1  # number of the newest session; increases, even across coordinators

    def add(self, member: Member, earliest: int) -> None:
        self._by_member[member] = Joiner(earliest)

    def __contains__(self, member: Member) -> bool:
        return member in self._by_member

    def died(self, member: Member) -> None:
        """Removes a dead joiner. If it was a donor, its joiners restart with other donors."""
        self._by_member.pop(member, None)
        for joiner in self._by_member.values():
            if member in joiner.donors:
                joiner.restart()

    def find_donors(self, committed: int, generation: int, sources: Sources) -> list[Donation]:
        """Assigns donors to every joiner that needs them now. Returns the new donations."""
        found: list[Donation] = []
        for member, joiner in sorted(self._by_member.items()):
            if joiner.donors or committed + LEAD < joiner.earliest:
                continue
            serving = Counter(donor for j in self._by_member.values() for donor in j.donors)
            joiner.donors = sources(member, serving)
            if joiner.donors:
                joiner.session = self._session = max(self._session + 1, generation * SESSIONS)
                of = sum(map(len, joiner.donors.values()))
                found += [Donation(donor, member, joiner.session, units, of) for donor, units in joiner.donors.items()]
        return found

    def synced(self, member: Member, step: int, session: int) -> bool:
        """Records progress of a joiner. Returns False if the member is no longer a joiner, or if the session is old,
        because its donors then do not send the next step."""
        joiner = self._by_member.get(member)
        if joiner is None or not joiner.donors or joiner.session != session:
            return False
        joiner.synced = step
        return True

    def check(self, give: Callable[[Mapping[Member, Collection[UnitId]]], bool]) -> None:
        """Restarts joiners if their donors no longer hold their units. give: see `Units.give`."""
        for joiner in self._by_member.values():
            if joiner.donors and not give(joiner.donors):
                joiner.restart()

    def about_to_join(self, committed: int) -> bool:
        return bool(self._late(committed))

    def take_ready(self, committed: int) -> list[Member]:
        ready = [w for w, j in self._by_member.items() if j.synced == committed and j.earliest <= committed + 1]
        for member in ready:
            del self._by_member[member]
        return sorted(ready)

    def drop_late(self, committed: int) -> None:
        for joiner in self._late(committed):
            joiner.restart()

    def _late(self, committed: int) -> list[Joiner]:
        return [j for j in self._by_member.values() if j.synced == committed - 1 and j.earliest <= committed + 1]
