"""The embedded agreement: the supervisors elect the leader and acknowledge every membership.

    election = Election(rank=2, address=Place("127.0.0.1", 4711), token=token, leader=Leader(0, 0, "127.0.0.1", 4700))
    leader = await election.leader(after=0)
    await election.agree(generation=5, supervisors={1: place, 2: place})

As in Raft (Ongaro and Ousterhout, 2014), a voter has one vote per term. It does not vote for a candidate whose
membership is older than its own. The log is a single entry, the membership. A new membership needs a majority of the
last agreed membership, of every membership proposed since, and of itself (Raft's joint consensus). So any two
majorities that could decide something share a supervisor. A candidate needs the same majorities, with two exceptions:

- If enough answers show that the candidate's newest membership was agreed, older memberships are not needed.
- If enough answers show that the candidate's newest membership was not agreed, and the votes promise that it never will
  be, this membership is not needed. So a leader that died during a proposal does not block the election.

A leader that receives no answers must not propose anything, because its messages may still arrive (a link cut in one
direction). So before a proposal, a majority of the new members must confirm the leader. The leader sends the proposal
only to the new members, so a supervisor never acknowledges a membership that it is not a member of.

A candidate raises its term only after a majority has answered that it would vote for the candidate (Raft's pre-vote). A
voter answers no if it has a live leader, or if it has just voted for another candidate that may be alive. Voters refuse
a leader if they know a later term. If that term has no leader, the refused leader runs again in a newer term and
continues. So a delayed message of an old candidate can only delay the job.

Candidates take turns in the order of their ranks, the lost leader last. A candidate first waits `TURN_SECONDS` for
every live candidate with an earlier turn. After `TURNS_SECONDS` in total, further turns are shorter. A supervisor
whose port refuses connections for some time counts as dead (`refusal.py`). If the supervisors that do not count as
dead are not a majority, the election fails at once. A process on this machine that has ended is proven dead (see
`majority`).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any

from recycle_pp.wire.connection import Peer
from recycle_pp.wire.frames import encode
from recycle_pp.wire.messages.agreement import (
    TO_VOTER,
    Campaign,
    Leader,
    Leads,
    Membership,
    Place,
    Poll,
    Position,
    Propose,
    Who,
)
from recycle_pp.wire.messages.table import Message

from .agreement import Deposed, LostMajority, majority
from .process_identity import is_dead
from .refusal import REFUSED
from .voter import Roster, Voter
from .voter_client import VoterClient

TURN_SECONDS = 0.2  # seconds that a candidate waits for each live candidate with an earlier turn
TURNS_SECONDS = 5.0  # total seconds of turns before turns become short, because hundreds of candidates may be silent
SHORT_TURN_SECONDS = 0.005
CAMPAIGN_SECONDS = 6.0  # time limit of a campaign; as long as a round trip on slow machines
RETRY_SECONDS, LONGEST_RETRY_SECONDS = 0.02, 0.5  # seconds between two attempts: first value, limit of the backoff
NON_MEMBER_SECONDS = 8.0  # seconds for which a supervisor without a vote looks for the new leader
SLACK_SECONDS = 15.0  # seconds for an election after all supervisors have noticed the loss


class Election:
    """The embedded `Agreement`. Use it in the event loop's thread only.

    patience    seconds within which all other supervisors notice a loss that this one has noticed. An election,
                or the acknowledgement of a membership, may take `patience + SLACK_SECONDS`
    refused     see `VoterClient`
    first_term, others, job_id      see `make_agreement`
    """

    def __init__(
        self,
        rank: int,
        address: Place,
        token: str,
        leader: Leader | None = None,
        patience: float = 10.0,
        refused: float = REFUSED,
        first_term: int = 0,
        others: Mapping[int, Place] = MappingProxyType({}),
        job_id: str = "",
    ) -> None:
        self._rank = rank
        self._address = address
        self._token = token
        self._job_id = job_id
        self._patience = patience
        self._refused = refused
        self._known = others
        self.voter = Voter(rank, address, leader, first_term)
        self._clients: dict[Place, VoterClient] = {}
        self._broadcasts: set[asyncio.Task[None]] = set()
        self._confirmed = -1  # newest term in which this supervisor was confirmed as the leader

    async def leader(self, after: int) -> Leader:
        self.voter.mark_lost(after, self._rank)
        if self.voter.leader is None:
            candidacy = asyncio.create_task(self._run_as_candidate())
            elected = asyncio.create_task(self.voter.has_leader.wait())
            try:
                await asyncio.wait(
                    {candidacy, elected}, timeout=self._patience + SLACK_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
                if self.voter.leader is None and candidacy.done() and (failed := candidacy.exception()):
                    raise failed
            finally:
                elected.cancel()
                if not candidacy.cancel() and not candidacy.cancelled():
                    candidacy.exception()  # otherwise asyncio would log that nothing retrieved the exception
        if self.voter.leader is None:
            raise LostMajority(f"no majority of supervisors {_names(self.voter.newest.roster)} answered in time")
        return self.voter.leader

    async def agree(self, generation: int, supervisors: Mapping[int, Place]) -> int:
        supervisors = {**supervisors, self._rank: self._address}  # the leader is always a member
        try:
            async with asyncio.timeout(self._patience + SLACK_SECONDS):
                while True:
                    leader = await self._confirm_leadership(supervisors)
                    if leader is None:
                        continue
                    if await self._propose(leader, generation, supervisors):
                        return leader.term
                    await asyncio.sleep(RETRY_SECONDS)
        except TimeoutError:
            raise LostMajority(f"no majority of supervisors {_names(supervisors)} answered in time") from None

    async def confirm(self, held: bool) -> int:
        lapsed = not held and self.voter.leader is not None and self.voter.leader.term == self._confirmed
        others = self._others()
        if lapsed and others and all(is_dead(place.process) for _, place in others):
            # Before they ended, the others may have elected another leader and continued or finished the job, because
            # this one was suspended.
            raise LostMajority(f"all supervisors ({_names(self.voter.members())}) except this one have ended")
        while (leader := await self._confirm_leadership(self.voter.members())) is None:
            pass
        self._confirmed = leader.term
        return leader.term

    async def supervisors(self) -> Mapping[int, Place]:
        return self.voter.newest.roster

    async def generation(self) -> int:
        return self.voter.newest.position[1]

    async def successor(self, leader: Leader) -> Leader:
        while self.voter.leader is None or self.voter.leader.term <= leader.term:
            await self.voter.leader_changed.wait()
        return self.voter.leader

    async def handle(self, peer: Peer) -> None:
        async for message in peer.listen(TO_VOTER):
            peer.send(self.voter.answer(message))

    def is_me(self, leader: Leader) -> bool:
        return leader == (leader.term, self._rank, *self._address[:2])

    def close(self) -> None:
        for task in self._broadcasts:
            task.cancel()
        for client in self._clients.values():
            client.close()

    # -- as a candidate ----------------------------------------------------------------------------------------

    async def _run_as_candidate(self) -> None:
        """Runs as a candidate until elected or cancelled. Raises LostMajority if too few supervisors can answer."""
        if self._rank not in self.voter.members():
            # A new node waits longer, because any leader will accept it and make it a member in the next generation.
            new = bool(self._known) and self.voter.newest.position == (-1, -1)
            seconds = self._patience + SLACK_SECONDS if new else min(self._patience, NON_MEMBER_SECONDS)
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._find_leader()
            known = _names(self.voter.newest.roster)
            raise LostMajority(f"no majority of supervisors {known} answered in time; this one has no vote")
        gone: set[int] = set()
        await self._wait_for_turn(gone)
        while self.voter.leader is None:
            await self._ask_all(
                lambda: Poll(self._rank, self.voter.newest.position, sorted(gone)), gone, repeat=True, candidate=True
            )
            await self._campaign(gone)
            if self.voter.leader is None:
                await asyncio.sleep(random.uniform(0, 2 * TURN_SECONDS))  # breaks a tie between two candidates

    async def _find_leader(self) -> None:
        """Asks all other supervisors repeatedly who the leader is, until the caller cancels it. Used by a supervisor
        that is not a member, which cannot be a candidate."""

        async def ask(rank: int, place: Place) -> None:
            with suppress(OSError):
                self.voter.learn_from(rank, await self._client(place).ask(encode(Who())))

        while True:
            others = {**self._known, **dict(self._others())}
            await asyncio.gather(*(ask(rank, place) for rank, place in others.items()))
            await asyncio.sleep(LONGEST_RETRY_SECONDS)

    async def _wait_for_turn(self, gone: set[int]) -> None:
        """Waits `TURN_SECONDS` for each live member with a lower rank, but not much longer than `TURNS_SECONDS`. The
        lost leader comes last. Adds dead members to `gone`."""
        loop = asyncio.get_running_loop()
        short_from = loop.time() + TURNS_SECONDS
        roster = self.voter.newest.roster
        order = [rank for rank in sorted(roster) if rank != self.voter.lost_rank]
        for rank in order[: order.index(self._rank)] if self._rank in order else order:
            with suppress(TimeoutError):
                async with asyncio.timeout(TURN_SECONDS if loop.time() < short_from else SHORT_TURN_SECONDS):
                    await self._until_gone(rank, roster[rank])
                    gone.add(rank)

    async def _until_gone(self, rank: int, place: Place) -> None:
        """Blocks until supervisor `rank` counts as dead."""
        while not is_dead(place.process):
            try:
                self.voter.learn_from(rank, await self._client(place).ask(encode(Who())))
                await asyncio.sleep(TURN_SECONDS)
            except ConnectionRefusedError:
                return
            except OSError:
                pass
            await asyncio.sleep(RETRY_SECONDS)

    async def _campaign(self, gone: set[int]) -> None:
        if self.voter.leader is not None:
            return
        self.voter.learn(self.voter.term + 1)
        term = self.voter.term
        self.voter.vote = self._rank
        campaign = Campaign(term, self._rank, self.voter.newest.position)
        with suppress(TimeoutError):
            async with asyncio.timeout(CAMPAIGN_SECONDS):
                required = await self._ask_all(lambda: campaign, gone, candidate=True)
                if required and self.voter.leader is None and self.voter.term == term:
                    self.voter.drop_proposals_after(required[-1].position)
                    leader = Leader(term, self._rank, self._address.host, self._address.port)
                    self.voter.follow(leader)
                    self._broadcast(Leads(leader))

    async def _confirm_leadership(self, among: Collection[int]) -> Leader | None:
        """Returns this supervisor as the leader, once a majority within `among` has confirmed it.

        Returns None if the caller must try again. In that case either most members knew a later term and this
        supervisor has been re-elected, or `among` currently has no majority (supervisors with broken connections may
        come back).
        """
        leader = self.voter.leader or await self.leader(after=self.voter.lost)
        if not self.is_me(leader):
            raise Deposed("another supervisor coordinates now")
        confirmed = await self._ask_all(lambda: Leads(leader), set(), among=among)
        if self.voter.leader != leader:
            return None
        if confirmed:
            return leader
        if self.voter.term > leader.term:
            await self.leader(after=leader.term)
        else:
            await asyncio.sleep(TURN_SECONDS)
        return None

    async def _propose(self, leader: Leader, generation: int, roster: Roster) -> bool:
        """Proposes a membership to its members. Returns True once a majority has acknowledged it, False if too many
        members refuse or another supervisor leads."""
        position = (leader.term, generation)
        if self.voter.newest.position != position:  # not proposed by an earlier attempt
            self.voter.memberships.append(Membership(position, self._rank, roster))
        question = Propose(leader, self.voter.memberships)
        others = [(rank, place) for rank, place in self._others() if rank in roster]
        if not await self._ask_all(lambda: question, set(), others=others) or self.voter.leader != leader:
            return False
        self.voter.mark_agreed(position)
        self._broadcast(Propose(leader, self.voter.memberships))  # informs all members of the agreement
        return True

    async def _ask_all(
        self,
        question: Callable[[], Message],
        gone: set[int],
        repeat: bool = False,
        candidate: bool = False,
        among: Collection[int] | None = None,
        others: Sequence[tuple[int, Place]] | None = None,
    ) -> list[Membership]:
        """Sends a request to the members until the outcome is settled.

        Returns the memberships in `Voter.required` once a majority of each of them has answered yes. Returns [] if too
        many members have answered no.

        question   makes the request
        gone       ranks known to be dead; ranks that are found dead are added
        repeat     whether to send the request again to members that answer no
        candidate  whether the request asks for votes. If so, a proposed membership is not required once it can no
                   longer be agreed, because too many voters that answered yes do not have it
        among      ranks whose answers count; default: all
        others     ranks and addresses to ask; default: all other members

        Raises LostMajority if the live members are not a majority.
        """
        newest = self.voter.newest
        frame = encode(question())
        everyone = self._others()
        others = everyone if others is None else others
        yes = {self._rank}
        no = set[int]()
        dead = {rank for rank, place in everyone if is_dead(place.process)}
        gone |= dead
        holders = {self._rank, newest.leader}  # ranks that have acknowledged the newest membership
        possible_holders = holders | self.voter.members().keys()
        # Voters that answer yes but do not have `newest`: rank -> position of the voter's newest membership.
        outdated: dict[int, Position] = {}

        def complete() -> list[Membership]:
            required = self.voter.required(holders, outdated if candidate else {}, dead)
            counted = yes if among is None else yes & set(among)
            return required if all(majority(counted, of.roster, dead) for of in required) else []

        def hopeless(left: Collection[int]) -> Roster | None:
            """A roster that blocks the decision, because all ranks in `left` together are not a majority of it. None if
            no roster blocks the decision."""
            most = {rank: (-1, -1) for rank in left if rank not in holders} | outdated
            cases = [
                self.voter.required(possible_holders),
                *([self.voter.required(holders, most, dead)] if candidate else []),
            ]
            missed = [next((of.roster for of in case if not majority(left, of.roster, dead)), None) for case in cases]
            return missed[0] if None not in missed else None

        async def ask(rank: int, place: Place) -> None:
            pause = RETRY_SECONDS
            while rank not in yes:
                if is_dead(place.process):
                    dead.add(rank)
                    break
                try:
                    answer = await self._client(place).ask(encode(question()) if repeat else frame)
                except ConnectionRefusedError:
                    if is_dead(place.process):
                        dead.add(rank)
                    break
                except OSError:
                    pass
                else:
                    self.voter.learn_from(rank, answer)
                    (holders.add if answer.position == newest.position else possible_holders.discard)(rank)
                    (yes if answer.yes else no).add(rank)
                    if answer.yes and answer.position < newest.position:
                        outdated[rank] = answer.position
                    if not repeat:
                        return
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_RETRY_SECONDS)
            if rank not in yes:
                gone.add(rank)
                possible_holders.difference_update({rank} - holders)

        asking = {asyncio.create_task(ask(*each)) for each in others}
        try:
            while not (required := complete()):
                left = self.voter.members().keys() - gone
                if roster := hopeless(left):
                    few = f"only {_names(left & roster.keys())} of supervisors {_names(roster)} can answer"
                    raise LostMajority(f"{few}, which is not a majority")
                if not asking or (not repeat and hopeless(left - no)):
                    return []
                _, asking = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in asking:
                task.cancel()
        # If the newest membership is agreed, drop the older ones. But a leader that is not in the newest one keeps
        # them, because only they can elect it again.
        if len(self.voter.required(holders)) == 1 and self._rank in newest.roster:
            self.voter.mark_agreed(newest.position)
        return required

    def _broadcast(self, message: Message) -> None:
        """Sends a message to each member in the background, repeatedly until the member has answered or counts as dead.
        Cancels earlier broadcasts."""
        frame = encode(message)

        async def send(place: Place) -> None:
            pause = RETRY_SECONDS
            while not is_dead(place.process):
                try:
                    await self._client(place).ask(frame)
                    return
                except ConnectionRefusedError:
                    return
                except OSError:
                    pass
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_RETRY_SECONDS)

        for task in self._broadcasts:
            task.cancel()
        for _, place in self._others():
            task = asyncio.create_task(send(place))
            self._broadcasts.add(task)
            task.add_done_callback(self._broadcasts.discard)

    def _others(self) -> Sequence[tuple[int, Place]]:
        return [(rank, place) for rank, place in sorted(self.voter.members().items()) if rank != self._rank]

    def _client(self, place: Place) -> VoterClient:
        return self._clients.setdefault(place, VoterClient(place, self._token, self._refused, self._job_id))


def _names(ranks: Any) -> str:
    return ", ".join(map(str, sorted(ranks)))
