"""Finds workers with a wrong copy of a unit (a block of one layer's state), by comparing its holders' checksums.

    found = compare(table, votes)     # the differences within one stage; None if all copies agree
    found.wrong                       # holder -> a unit that it holds a wrong copy of
    found.unclear                     # units whose copies differ, but it is unknown which copies are wrong

Each holder updates its own copy, and all copies must stay equal. A copy counts as wrong if its holder found a change
without an update (`Vote.changed`), or if it differs from the majority of three or more copies. Other workers cannot
verify a copy, because the unit's previous state is gone and the update cannot be repeated.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from recycle_pp.wire.messages.members import Member
from recycle_pp.wire.messages.steps import Vote
from recycle_pp.wire.messages.units import UnitId

from .holders import Table


@dataclass(frozen=True)
class Mismatch:
    """The differences between the copies of one stage's units.

    disputed  unit -> groups of holders with the same checksum, the largest last
    changed   holder that reports its own copy of a unit as wrong -> the first such unit
    outvoted  any other holder with a wrong copy -> a unit in which its checksum differs from the majority
    unclear   disputed units for which it is unknown which copies are wrong
    """

    disputed: dict[UnitId, list[list[Member]]]
    changed: dict[Member, UnitId]
    outvoted: dict[Member, UnitId]
    unclear: list[UnitId]

    @property
    def wrong(self) -> dict[Member, UnitId]:
        return self.outvoted | self.changed


def compare(
    table: Table, votes: Mapping[Member, Vote], made: Collection[tuple[UnitId, Member]] = ()
) -> Mismatch | None:
    """The disputes between the holders of one stage; None if all copies agree.

    table: unit -> its holders, in the stage's order
    votes: holder -> its vote, for all holders
    made: copies made since the last vote, as (unit, holder)

    A copy in `made` has the bits of its source, so it does not count towards a majority. In a unit without a majority,
    holders that are wrong in another unit are left out, and the others are compared again.
    """
    said = {peer: iter(array("q", vote.checksums)) for peer, vote in votes.items()}
    values = {unit: {peer: next(said[peer]) for peer in sorted(holders)} for unit, holders in table.items()}
    changed = {peer: vote.changed[0] for peer, vote in sorted(votes.items()) if vote.changed}
    disputed = {unit: _groups(of) for unit, of in values.items() if len(set(of.values())) > 1}
    if not disputed and not changed:
        return None

    def outvoted_by(unit: UnitId, but: Collection[Member]) -> list[Member]:
        """Holders whose copy of `unit` differs from the most frequent checksum. Empty if another checksum is equally
        frequent, or if fewer than two copies have the most frequent one. The frequencies do not include copies in
        `made`. Holders in `but` are left out altogether."""
        asked = {peer: value for peer, value in values[unit].items() if peer not in but}
        groups = [[], *_groups({peer: value for peer, value in asked.items() if (unit, peer) not in made})]
        if len(groups[-1]) < 2 or len(groups[-1]) == len(groups[-2]):
            return []
        return [peer for peer, value in asked.items() if value != asked[groups[-1][0]]]

    known = {unit: [peer for peer in values[unit] if unit in votes[peer].changed] for unit in disputed}
    outvoted = {peer: unit for unit in disputed for peer in outvoted_by(unit, known[unit])}
    while True:
        wrong = changed.keys() | outvoted.keys()
        found = {peer: unit for unit in disputed for peer in outvoted_by(unit, wrong)}
        if not found:
            break
        outvoted |= found
    left = {unit: {value for peer, value in values[unit].items() if peer not in wrong} for unit in disputed}
    return Mismatch(disputed, changed, outvoted, [unit for unit, of in left.items() if len(of) > 1])


def _groups(values: Mapping[Member, int]) -> list[list[Member]]:
    """Groups of holders with the same checksum, the largest last."""
    found: dict[int, list[Member]] = {}  # checksum -> holders
    for peer, value in values.items():
        found.setdefault(value, []).append(peer)
    return sorted(found.values(), key=len)
