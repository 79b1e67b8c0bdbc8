"""Elects the leader, whose supervisor hosts the coordinator, and agrees on memberships.

    agreement = make_agreement(settings, rank, address, token, leader)       # one in every supervisor
    leader = await agreement.leader(after=leader.term)      # after a loss: the next leader, maybe this supervisor
    await agreement.agree(4, {0: Place("10.0.0.2", 4711), ...})  # on the leader, before each generation starts
    await agreement.successor(leader)                      # waits for a leader that replaces `leader`

At most one side of a partitioned network can continue the job. A supervisor listens at its `address` from its first
welcome to its end. It accepts the agreement's own connections (`handle`) and, if it leads, supervisors and workers.
`control.coordinator` selects the implementation: `embedded`, a vote of the supervisors (`election.py`), or `etcd`
(`etcd_agreement.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from recycle_pp.wire.connection import Peer
from recycle_pp.wire.messages.agreement import Leader, Place

PLANNING = 5.0  # seconds that a coordinator may be silent beyond control.suspicion, while it makes plans


class LostMajority(RuntimeError):
    """This side of the job has to stop; another side may continue. The text is a sentence for the user."""


class Deposed(RuntimeError):
    """Another supervisor leads. This one has to follow the new leader; its own decisions since then are void."""


class Agreement(Protocol):
    async def leader(self, after: int) -> Leader:
        """The next leader. after: term of the lost leader. Blocks until there is a next leader.

        Takes part in the election, so the result may be this supervisor, which then coordinates. A leader that can
        still reach a majority is not deposed: if the lost leader answers that it leads term `after`, the lost leader is
        the result. Otherwise the result has a later term. Raises LostMajority if this side cannot elect a leader.
        """
        ...

    async def agree(self, generation: int, supervisors: Mapping[int, Place]) -> int:
        """Called by the leader. Agrees on a generation with these supervisors, and returns the term of the agreement.

        From then on, decisions need a majority of these supervisors. No leader of an older term, and no supervisor that
        only knows an older membership, can get another generation agreed. The leader may cancel the call for a newer
        generation. The generations of one leader increase; -1 stands for the time before the first one.

        Raises Deposed if another supervisor leads, LostMajority if too few answer.
        """
        ...

    async def confirm(self, held: bool) -> int:
        """Called by the leader. Returns its term, once a majority has confirmed to follow the leader in this term.

        held: whether an earlier confirmation is still valid, so no other supervisor can have been elected. Blocks while
        answers are missing. Raises Deposed if another supervisor leads, LostMajority if too few can answer.
        """
        ...

    async def supervisors(self) -> Mapping[int, Place]:
        """The newest membership that this supervisor knows: the supervisors that a new leader expects."""
        ...

    async def generation(self) -> int:
        """The generation of the newest membership that this supervisor knows; -1 if no generation was agreed, so no
        worker has begun a step."""
        ...

    async def successor(self, leader: Leader) -> Leader:
        """Waits for a leader of a later term than that of `leader`, and returns it."""
        ...

    async def handle(self, peer: Peer) -> None:
        """Serves a connection from another supervisor's agreement (CandidateHello) until the connection ends."""
        ...

    def close(self) -> None: ...


def majority(ranks: Collection[int], roster: Collection[int], dead: Collection[int] = ()) -> bool:
    """Whether `ranks` can decide for the roster: they include more than half of it, half of it with its lowest rank, or
    all its survivors.

    dead: ranks proven dead. A minority must include all survivors, because each survivor may be the only one that knows
    what the dead have agreed to.
    """
    present = set(ranks) & set(roster)
    if present and present >= set(roster) - set(dead):
        return True
    return 2 * len(present) > len(roster) or (2 * len(present) == len(roster) and min(roster) in present)
