"""The agreement in etcd. Decisions are made outside the job, so any part of the job that reaches etcd may continue.

    agreement = EtcdAgreement(Etcd(endpoints), rank, address, token, leader, patience)     # see agreement.py

There are three kinds of keys, under a prefix derived from the job's token:

    leader       [term, rank, host, port]       deleted `patience` seconds after the last renewal of the leader's lease
    membership   run, term, generation, roster  the last agreed membership; no lease
    lost/RANK    term                           term of the leader that RANK has lost, while RANK looks for the next one

A transaction changes the leader or the membership. It fails if either key has changed since the supervisor read them.
So only one side of a partition gets the next membership agreed. A replaced leader cannot get any membership agreed.
Neither can a new leader if its side does not know the last agreed generation, because the old leader may continue
in that generation.

A leader is replaced when its lease expires, or when most members have lost it. A supervisor that has lost only the
connection follows the leader again when the leader answers it. While etcd is unreachable, nothing changes and training
continues. The recovery from a death then waits at most twice `ETCD_SECONDS`: once in `agree` and, after `agree` has
failed, once in `leader`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from recycle_pp.wire.connection import Peer
from recycle_pp.wire.frames import encode
from recycle_pp.wire.messages.agreement import TO_VOTER, Answer, Who

from .agreement import Deposed, Leader, LostMajority, Place, majority
from .etcd import Created, Delete, Entry, Etcd, Modified, Put, Refusal, Unreachable
from .voter_client import VoterClient

ETCD_SECONDS = 60.0  # seconds that one call waits while etcd does not answer
RETRY_SECONDS = 0.1  # seconds between two attempts
LOOK_SECONDS = 0.5  # seconds between two questions to a lost leader


class Membership(NamedTuple):
    run: str  # random; distinguishes jobs started with the same token
    term: int
    generation: int
    roster: dict[int, Place]

    def to_text(self) -> str:
        return json.dumps([self.run, self.term, self.generation, [[r, *p] for r, p in sorted(self.roster.items())]])

    @classmethod
    def from_text(cls, text: str) -> Membership:
        run, term, generation, roster = json.loads(text)
        return cls(run, term, generation, {rank: Place(*place) for rank, *place in roster})


class View(NamedTuple):
    """A snapshot of the keys."""

    leader: Leader | None
    leader_revision: int  # revision at which the leader's key was created; 0: no leader
    membership: Membership | None
    membership_revision: int  # revision at which the membership was last changed; 0: none
    lost: dict[int, int]  # rank -> term of the leader that this rank has lost


class EtcdAgreement:
    """The `Agreement` in etcd.

    patience    seconds without a renewal after which a leader's lease expires
    first_term  see `make_agreement`
    new         whether this supervisor is on a new node, and not a member yet
    job_id      see `make_agreement`
    """

    def __init__(
        self,
        etcd: Etcd,
        rank: int,
        address: Place,
        token: str,
        leader: Leader | None,
        patience: float,
        first_term: int = 0,
        new: bool = False,
        job_id: str = "",
    ) -> None:
        self._first_term = first_term
        self._new = new
        self._etcd = etcd
        self._rank = rank
        self._address = Place(*address)
        self._patience = patience
        self._token = token
        self._job_id = job_id
        self._prefix = f"/recycle_pp/{hashlib.sha256(token.encode()).hexdigest()[:16]}/"
        self._run: str | None = None
        self._own_term: Leader | None = None  # this supervisor, with the term that it leads; None: it does not lead
        self._lease = 0
        self._tasks: set[asyncio.Task[None]] = set()
        if leader is not None:
            self._background(self._learn_run())

    async def leader(self, after: int) -> Leader:
        self._own_term = None
        answers = asyncio.create_task(self._until_it_answers(after))
        try:
            return await self._next_leader(after, answers)
        finally:
            answers.cancel()

    async def agree(self, generation: int, supervisors: Mapping[int, Place]) -> int:
        outage = _Outage()
        wrote = False
        roster = dict(supervisors)
        while True:
            try:
                view = await self._read_view()
                held = self._own_membership(view)
                new = held._replace(generation=generation, roster=roster)
                if wrote and held == new:
                    return held.term
                if generation <= held.generation >= 0:
                    raise LostMajority("the job may continue elsewhere, in a generation unknown to this side")
                if view.leader_revision:
                    wrote = True
                    await self._write([self._put(new)], view)
                    continue
                await self._renew(view)
                outage.ended()
            except (Unreachable, Refusal) as error:
                outage.check(error)
            await asyncio.sleep(RETRY_SECONDS)

    async def confirm(self, held: bool) -> int:
        """Like `Agreement.confirm`. While etcd does not answer, a lease that is still held counts as confirmed, so that
        steps continue."""
        while True:
            try:
                view = await self._read_view()
                term = self._own_membership(view).term
                if view.leader_revision:
                    return term
                await self._renew(view)
            except (Unreachable, Refusal):
                if held and self._own_term is not None:
                    return self._own_term.term
            await asyncio.sleep(RETRY_SECONDS)

    async def supervisors(self) -> Mapping[int, Place]:
        membership = await self._membership()
        return membership.roster if membership else {}

    async def generation(self) -> int:
        membership = await self._membership()
        return membership.generation if membership else -1

    async def successor(self, leader: Leader) -> Leader:
        """Never returns: with etcd a leader learns of its successor when `agree` fails."""
        return await asyncio.get_running_loop().create_future()

    async def handle(self, peer: Peer) -> None:
        """Answers supervisors that ask whether this one leads, after they have lost the connection to it."""
        async for _ in peer.listen(TO_VOTER):
            leads = self._own_term
            peer.send(Answer(leads is not None, (-1, -1), leads.term if leads else -1, leads))

    def is_me(self, leader: Leader) -> bool:
        return leader == (leader.term, self._rank, *self._address[:2])

    def close(self) -> None:
        """Stops the renewals, so a leader's lease expires."""
        for task in self._tasks:
            task.cancel()

    # -- becoming and staying the leader -----------------------------------------------------------------------

    async def _next_leader(self, after: int, answers: asyncio.Task[Leader]) -> Leader:
        """answers: task that returns the lost leader, once that supervisor answers that it still leads"""
        loop = asyncio.get_running_loop()
        outage = _Outage()
        patient_until = loop.time() + 3 * self._patience
        marked = False
        while True:
            try:
                view = await self._read_view()
                # `is_me` also holds for an earlier process at the same address; `_is_member` excludes it.
                if view.leader and self.is_me(view.leader) and view.leader.term > after and self._is_member(view):
                    return self._start_leading(view.leader, view)
                if view.leader is not None and view.leader.term > after >= 0:
                    return view.leader
                if answers.done() and view.leader == answers.result():
                    await self._etcd.write([Delete(f"{self._prefix}lost/{self._rank}")])
                    return answers.result()
                if view.leader is None or self._is_lost(view):
                    if not self._new or self._is_member(view) or loop.time() > patient_until:
                        await self._try_to_lead(view, after)
                        continue
                elif loop.time() > patient_until:
                    raise LostMajority(self._still_leads(view.leader, after))
                if after >= 0 and not marked:
                    await self._mark_lost(after)
                    marked = True
                outage.ended()
            except (Unreachable, Refusal) as error:
                outage.check(error)
                patient_until = loop.time() + 3 * self._patience  # wait again: after an outage etcd extends all leases
            await asyncio.sleep(RETRY_SECONDS)

    async def _until_it_answers(self, after: int) -> Leader:
        """The leader of the term `after`, once it answers that it still leads."""
        while True:
            with suppress(OSError, Unreachable, Refusal, LostMajority):
                leader = (await self._read_view()).leader
                if leader is not None and leader.term == after:
                    client = VoterClient(Place(leader.host, leader.port), self._token, job_id=self._job_id)
                    try:
                        if (await client.ask(encode(Who()))).leader == leader:
                            return leader
                    finally:
                        client.close()
            await asyncio.sleep(LOOK_SECONDS)

    async def _try_to_lead(self, view: View, after: int) -> None:
        """Tries once to create the leader's key, or to delete it if it belongs to a lost leader. Another supervisor may
        be faster."""
        if after < 0:  # a new job's first supervisor; existing keys belong to an older job
            new = Membership(secrets.token_hex(8), self._first_term, -1, {self._rank: self._address})
        elif view.membership is not None and self._is_member(view):
            new = view.membership._replace(term=view.membership.term + 1)
        else:
            raise LostMajority("the job has ended or continues without this supervisor")
        if view.leader_revision:  # a leader that most members have lost
            await self._write([Delete(f"{self._prefix}leader")], view)
            return
        self._lease = await self._etcd.grant(self._patience)
        leader = Leader(new.term, self._rank, *self._address[:2])
        await self._write([self._put_leader(leader), self._put(new)], view)

    def _is_member(self, view: View) -> bool:
        return view.membership is not None and view.membership.roster.get(self._rank) == self._address

    def _start_leading(self, leader: Leader, view: View) -> Leader:
        assert view.membership is not None
        self._run = view.membership.run
        self._own_term = leader
        self._background(self._keep_lease(leader))
        return leader

    async def _keep_lease(self, leader: Leader) -> None:
        """Renews the lease. If the lease has expired and there is no other leader, takes a new lease."""
        while self._own_term == leader:
            with suppress(Unreachable, Refusal, LostMajority, Deposed):
                if not await self._etcd.keep_alive(self._lease):
                    await self._renew(await self._read_view())
            await asyncio.sleep(self._patience / 4)

    async def _renew(self, view: View) -> None:
        held = self._own_membership(view)
        if not view.leader_revision and self._own_term is not None:
            self._lease = await self._etcd.grant(self._patience)
            await self._write([self._put_leader(self._own_term), self._put(held)], view)

    def _own_membership(self, view: View) -> Membership:
        """The last membership that this leader got agreed. Raises Deposed if this supervisor no longer leads."""
        leads = self._own_term
        held = view.membership
        if leads is None or held is None or (held.run, held.term) != (self._run, leads.term):
            raise Deposed("another supervisor coordinates now")
        if view.leader not in (leads, None):
            raise Deposed("another supervisor coordinates now")
        return held

    def _is_lost(self, view: View) -> bool:
        """Whether most members have marked the leader as lost."""
        if view.membership is None or view.leader is None:
            return False
        return majority([r for r, term in view.lost.items() if term == view.leader.term], view.membership.roster)

    async def _mark_lost(self, term: int) -> None:
        lease = await self._etcd.grant(3 * self._patience)
        await self._etcd.write([Put(f"{self._prefix}lost/{self._rank}", str(term), lease)])

    # -- keys --------------------------------------------------------------------------------------------------

    async def _membership(self) -> Membership | None:
        outage = _Outage()
        while True:
            try:
                return (await self._read_view()).membership
            except (Unreachable, Refusal) as error:
                outage.check(error)
            await asyncio.sleep(RETRY_SECONDS)

    async def _read_view(self) -> View:
        keys = await self._etcd.read(self._prefix)
        found = {key.removeprefix(self._prefix): entry for key, entry in keys.items()}
        none = Entry("", 0, 0)
        leader = found.get("leader", none)
        membership = found.get("membership", none)
        view = View(
            Leader(*json.loads(leader.value)) if leader.value else None,
            leader.created,
            Membership.from_text(membership.value) if membership.value else None,
            membership.modified,
            {int(key.removeprefix("lost/")): int(e.value) for key, e in found.items() if key.startswith("lost/")},
        )
        if self._run is not None and view.membership is not None and view.membership.run != self._run:
            raise LostMajority("another job with the same token uses this etcd now")
        return view

    async def _write(self, changes: list[Put | Delete], view: View) -> bool:
        """Applies the changes if the leader and the membership are still those of `view`. Returns whether the changes
        were applied."""
        leader = f"{self._prefix}leader"
        membership = f"{self._prefix}membership"
        return await self._etcd.write(
            changes, [Created(leader, view.leader_revision), Modified(membership, view.membership_revision)]
        )

    def _put(self, membership: Membership) -> Put:
        return Put(f"{self._prefix}membership", membership.to_text())

    def _put_leader(self, leader: Leader) -> Put:
        return Put(f"{self._prefix}leader", json.dumps(leader), self._lease)

    # -- helpers -----------------------------------------------------------------------------------------------

    async def _learn_run(self) -> None:
        """Reads the job's random name (`Membership.run`) early, while the job's leader is known to be alive."""
        while self._run is None:
            with suppress(Unreachable, Refusal):
                view = await self._read_view()
                self._run = view.membership.run if view.membership else None
            await asyncio.sleep(1.0)

    def _still_leads(self, leader: Leader, after: int) -> str:
        where = f"the supervisor of rank {leader.rank} at {leader}"
        if after < 0:
            return f"{where} coordinates another job with the same token in this etcd"
        return f"{where} coordinates the job and cannot be reached from here"

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Outage:
    """Measures how long etcd has not answered."""

    def __init__(self) -> None:
        self._since = asyncio.get_running_loop().time()

    def ended(self) -> None:
        self._since = asyncio.get_running_loop().time()

    def check(self, error: Exception) -> None:
        """Raises LostMajority if etcd has not answered for `ETCD_SECONDS`. error: the newest failure."""
        if asyncio.get_running_loop().time() - self._since > ETCD_SECONDS:
            raise LostMajority(f"{error}; no membership can be agreed without it") from error
