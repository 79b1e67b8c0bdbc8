"""Workers whose copy of a unit is wrong, if its holders have updated it each for itself and do not agree.

    found = compare(table, votes)     # of one stage: unit -> holders, pipeline -> vote; None: all agree
    found.wrong                       # who is wrong, and the unit that shows it
    found.unclear                     # units of which it is unknown

Two kinds of evidence. Who says that something other than an update has changed its own copy (`Vote.changed`) is wrong;
and of three or more who do not agree, whoever differs from most. Nobody else can know: what a block was before its
update is gone, so no third worker could compute it again.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from recycle_pp.wire.messages.workers import Vote

from .holders import Table


@dataclass(frozen=True)
class Mismatch:
    """Holders are named by their pipelines.

    disputed  block -> those who say the same of it, the largest group last
    changed   who says itself that it is wrong -> the first such block
    outvoted  others who are wrong -> a block of which most others say something else
    unclear   disputed units of which it is unknown
    """

    disputed: dict[int, list[list[int]]]
    changed: dict[int, int]
    outvoted: dict[int, int]
    unclear: list[int]

    @property
    def wrong(self) -> dict[int, int]:
        return self.outvoted | self.changed


def compare(table: Table, votes: Mapping[int, Vote], made: Collection[tuple[int, int]] = ()) -> Mismatch | None:
    """votes: of all holders. made: (block, holder) of copies that were made since the last vote.

    A copy that was made knows no more than its source, and is no witness. Who is wrong in one block has no say in
    another that nobody can tell of otherwise.
    """
    said = {peer: iter(array("q", vote.checksums)) for peer, vote in votes.items()}
    values = [{peer: next(said[peer]) for peer in sorted(holders)} for holders in table]
    changed = {peer: vote.changed[0] for peer, vote in sorted(votes.items()) if vote.changed}
    disputed = {block: _groups(of) for block, of in enumerate(values) if len(set(of.values())) > 1}
    if not disputed and not changed:
        return None

    def outvoted_by(block: int, but: Collection[int]) -> list[int]:
        """Who says something else than most witnesses do, of whom there are two at least."""
        asked = {peer: value for peer, value in values[block].items() if peer not in but}
        groups = [[], *_groups({peer: value for peer, value in asked.items() if (block, peer) not in made})]
        if len(groups[-1]) < 2 or len(groups[-1]) == len(groups[-2]):
            return []
        return [peer for peer, value in asked.items() if value != asked[groups[-1][0]]]

    known = {block: [peer for peer in values[block] if block in votes[peer].changed] for block in disputed}
    outvoted = {peer: block for block in disputed for peer in outvoted_by(block, known[block])}
    while True:
        wrong = changed.keys() | outvoted.keys()
        found = {peer: block for block in disputed for peer in outvoted_by(block, wrong)}
        if not found:
            break
        outvoted |= found
    left = {block: {value for peer, value in values[block].items() if peer not in wrong} for block in disputed}
    return Mismatch(disputed, changed, outvoted, [block for block, of in left.items() if len(of) > 1])


def _groups(values: Mapping[int, int]) -> list[list[int]]:
    """Those who say the same, the largest group last."""
    found: dict[int, list[int]] = {}
    for peer, value in values.items():
        found.setdefault(value, []).append(peer)
    return sorted(found.values(), key=len)
