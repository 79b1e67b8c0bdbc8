"""Elects the leader, which is the supervisor that hosts the coordinator, and agrees on memberships.

    agreement = make_agreement(settings, rank, address, token, job_id, leader)       # one in every supervisor
    leader = await agreement.leader(after=leader.term)      # after a loss; the next leader may be this supervisor
    await agreement.agree(4, {0: Place("10.0.0.2", 4711), ...})  # on the leader, before each generation starts
    await agreement.successor(leader)                      # waits for a leader that replaces `leader`

At most one side of a partitioned network can continue the job. A supervisor listens at its `address` from its first
welcome until it exits. It accepts connections of the agreement (`handle`) and, as the leader, of supervisors and
workers. `control.coordinator` selects the implementation: `embedded`, a vote of the supervisors (`election.py`), or
`etcd` (`etcd_agreement.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from recycle_pp.wire.connection import Peer
from recycle_pp.wire.messages.agreement import Leader, Place

PLANNING = 5.0  # seconds that a coordinator may be silent beyond control.suspicion, while it makes plans


class LostMajority(RuntimeError):
    """This supervisor cannot continue the job. Supervisors that it cannot reach may continue it. The text of the
    exception is a sentence for the user."""


class Deposed(RuntimeError):
    """Another supervisor leads. This one has to follow it. Decisions that this one has made since the election of the
    new leader are void."""


class Agreement(Protocol):
    async def leader(self, after: int) -> Leader:
        """Takes part in the election of the next leader and returns the winner. Blocks until there is one.

        after: term of the lost leader; -1 at the start of a job

        If the result is this supervisor, it must coordinate. If the leader of term `after` answers that it still leads,
        for instance because only the connection to it was lost, it is returned again. Any other result has a later
        term. Raises LostMajority if this side cannot elect a leader.
        """
        ...

    async def agree(self, generation: int, supervisors: Mapping[int, Place]) -> int:
        """Agrees on a generation with these supervisors. Returns the term of the agreement. Only the leader calls it.

        From then on, decisions need a majority of these supervisors. No leader of an older term, and no supervisor that
        only knows an older membership, can get another generation agreed. The leader may cancel the call in favour of a
        newer generation. Each call of a leader must have a larger generation than its previous call.

        Raises Deposed if another supervisor leads, LostMajority if too few answer.
        """
        ...

    async def confirm(self, held: bool) -> int:
        """Waits until a majority has confirmed that it follows this leader. Returns the leader's term. Only the leader
        calls it.

        held: whether an earlier confirmation is still valid, so that no other supervisor can have been elected

        Blocks until enough answers arrive. Raises Deposed if another supervisor leads, LostMajority if too few can
        answer.
        """
        ...

    async def supervisors(self) -> Mapping[int, Place]:
        """The newest membership that this supervisor knows. A new leader expects these supervisors to connect."""
        ...

    async def generation(self) -> int:
        """The generation of the newest membership that this supervisor knows. -1: no generation was agreed yet, so no
        worker has started a step."""
        ...

    async def successor(self, leader: Leader) -> Leader:
        """Waits for a leader of a later term than that of `leader`, and returns it."""
        ...

    async def handle(self, peer: Peer) -> None:
        """Serves a connection from another supervisor's agreement (CandidateHello) until the connection ends."""
        ...

    def is_me(self, leader: Leader) -> bool:
        """Whether `leader` is this supervisor, and not a new node with the same rank."""
        ...

    def close(self) -> None: ...


def majority(ranks: Collection[int], roster: Collection[int], dead: Collection[int] = ()) -> bool:
    """Whether `ranks` can decide for the roster. They can if they include more than half of the roster, or half of it
    with its lowest rank, or all its ranks that are not in `dead`.

    dead: ranks proven dead. A minority must include all survivors, because each survivor may be the only one that knows
    of an agreement with the dead.
    """
    present = set(ranks) & set(roster)
    if present and present >= set(roster) - set(dead):
        return True
    return 2 * len(present) > len(roster) or (2 * len(present) == len(roster) and min(roster) in present)
