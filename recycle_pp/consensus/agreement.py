"""Who coordinates the job, and which membership stands: never two sides of a broken network that both go on.

    agreement = make_agreement(settings, rank, address, token, leader)       # one in every supervisor
    leader = await agreement.leader(after=leader.term)      # the leader was lost: the next one, maybe this supervisor
    await agreement.agree(4, {0: Place("10.0.0.2", 4711), ...})  # the leader: before it lets a generation begin
    await agreement.superseded(leader)                      # somebody else leads, and perhaps `leader` does not know

A supervisor's `address` is where it listens from its first welcome to its end, for whatever its role then asks: the
agreement's own connections (`handle`), and supervisors and workers once it leads. `control.coordinator` says what the
agreement rests on: `embedded`, a vote of the supervisors (`election.py`), or `etcd` (`etcd_agreement.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from recycle_pp.wire.connection import Peer
from recycle_pp.wire.messages.agreement import Leader, Place

PLANNING = 5.0  # seconds that a coordinator may be silent beyond control.suspicion: it has plans to make


class LostMajority(RuntimeError):
    """This side may not go on: the rest of the job, if there is one, does. The text is a sentence for the user."""


class Deposed(RuntimeError):
    """Another supervisor leads: this one is to follow it, and what it has decided since counts for nothing."""


class Agreement(Protocol):
    async def leader(self, after: int) -> Leader:
        """The leader of a term above `after`, the term of the one that was lost; blocks until there is one.

        Takes part in choosing it: the result may be this very supervisor, which then coordinates. Nobody is deposed as
        long as most still hear it, and who says itself that it leads `after` is no lost leader: then it is the result
        again. LostMajority where this side cannot have a leader.
        """
        ...

    async def agree(self, generation: int, supervisors: Mapping[int, Place]) -> int:
        """For the leader: agrees generation `generation`, with these supervisors as the ones whose majority counts
        next; returns the term of the agreement.

        Afterwards no leader of an older term, and no supervisor that knows only an older membership, can get another
        generation agreed. Raises Deposed if another supervisor leads, LostMajority if too few answer. A call may be
        cancelled: a newer generation takes its place. Generations of one leader grow; -1 comes before the first.
        """
        ...

    async def confirm(self, held: bool) -> int:
        """For the leader: its term, once a majority has answered to this very call that it follows this leader in it.

        held: an earlier confirmation is still valid, so no other supervisor can have been elected. Raises Deposed if
        another supervisor leads, LostMajority if too few can answer; blocks while answers are missing.
        """
        ...

    async def supervisors(self) -> Mapping[int, Place]:
        """The newest membership that is known here: those whom a new leader expects to find."""
        ...

    async def superseded(self, leader: Leader) -> Leader:
        """The leader of a later term than `leader`'s, as soon as this supervisor hears of one."""
        ...

    async def handle(self, peer: Peer) -> None:
        """Serves a connection of another supervisor's agreement (CandidateHello) to its end."""
        ...

    def close(self) -> None: ...


def majority(those: Collection[int], roster: Collection[int], dead: Collection[int] = ()) -> bool:
    """More than half of the roster; of an even split, the half that holds the lowest id; or all who are not proven
    dead.

    All, not most of them: what the dead have agreed to, only others who were asked with them may know.
    """
    present = set(those) & set(roster)
    if present and present >= set(roster) - set(dead):
        return True
    return 2 * len(present) > len(roster) or (2 * len(present) == len(roster) and min(roster) in present)
