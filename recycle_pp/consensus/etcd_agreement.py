"""The agreement on etcd: a place outside of the job decides, so any part of it that reaches etcd may go on.

    agreement = EtcdAgreement(Etcd(endpoints), rank, address, token, leader, patience)     # see agreement.py

Four kinds of keys, under a prefix that the job's token names:

    leader       [term, rank, host, port]       with the leader's lease: gone `patience` seconds after its last sign
    membership   run, term, generation, roster  what was agreed last; no lease
    lost/RANK    the term of the leader that this supervisor has lost, while it looks for another one

Every write is a transaction on the two keys' revisions that it was decided by, so of two sides that cannot see each
other only one gets the next membership agreed. A leader that was followed by another gets none; nor does a new leader
whose side has not heard of the last generation, as the one before may go on in it. A leader goes when its lease ends,
or when most of the membership have lost it. While etcd cannot be reached nothing changes: training continues. A death
waits twice `ETCD_SECONDS` at most: in `agree`, then in `leader`, as the coordinator gives way when `agree` fails.
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

from .agreement import Deposed, Leader, LostMajority, Place, majority
from .etcd import Created, Delete, Entry, Etcd, Modified, Put, Refusal, Unreachable

ETCD_SECONDS = 60.0  # for which one call waits for an etcd that does not answer
AGAIN = 0.1  # seconds between two times of asking


class Membership(NamedTuple):
    run: str  # random: a job that was started again with the same token is another one
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
    """The keys as of one moment."""

    leader: Leader | None
    led: int  # when the leader's key was created; 0: there is none
    membership: Membership | None
    changed: int  # when the membership was; 0: there is none
    lost: dict[int, int]  # rank -> term of the leader that it has lost


class EtcdAgreement:
    """patience: seconds without a sign of life until a leader's lease ends. first_term: see `make_agreement`."""

    def __init__(
        self,
        etcd: Etcd,
        rank: int,
        address: Place,
        token: str,
        leader: Leader | None,
        patience: float,
        first_term: int = 0,
    ) -> None:
        self._first_term = first_term
        self._etcd, self._rank, self._address, self._patience = etcd, rank, Place(*address), patience
        self._prefix = f"/recycle_pp/{hashlib.sha256(token.encode()).hexdigest()[:16]}/"
        self._run: str | None = None
        self._leads: Leader | None = None  # this supervisor's own term, if it has one
        self._lease = 0
        self._tasks: set[asyncio.Task[None]] = set()
        if leader is not None:
            self._background(self._learn_run())

    async def leader(self, after: int) -> Leader:
        loop = asyncio.get_running_loop()
        outage = _Outage()
        patient_until = loop.time() + 3 * self._patience
        marked = False
        self._leads = None
        while True:
            try:
                view = await self._look()
                if view.leader is not None and self._is_me(view.leader) and view.leader.term > after:
                    return self._begin(view.leader, view)
                if view.leader is not None and view.leader.term > after >= 0:
                    return view.leader
                if view.leader is None or self._is_lost(view):
                    await self._take(view, after)
                    continue
                if loop.time() > patient_until:
                    raise LostMajority(self._still_leads(view.leader, after))
                if after >= 0 and not marked:
                    await self._mark(after)
                    marked = True
                outage.ended()
            except (Unreachable, Refusal) as error:
                outage.goes_on(error)
                patient_until = loop.time() + 3 * self._patience  # after its outage etcd renews all leases
            await asyncio.sleep(AGAIN)

    async def agree(self, generation: int, supervisors: Mapping[int, Place]) -> int:
        outage, wrote = _Outage(), False
        roster = dict(supervisors)
        while True:
            try:
                view = await self._look()
                held = self._held(view)
                new = held._replace(generation=generation, roster=roster)
                if wrote and held == new:
                    return held.term
                if generation <= held.generation >= 0:
                    raise LostMajority("the job may go on elsewhere, in a generation that nobody here has heard of")
                if view.led:
                    wrote = True
                    await self._write([self._put(new)], view)
                    continue
                await self._renew(view)
                outage.ended()
            except (Unreachable, Refusal) as error:
                outage.goes_on(error)
            await asyncio.sleep(AGAIN)

    async def confirm(self, held: bool) -> int:
        """An etcd that does not answer stops no step: then a lease that is still held is confirmed."""
        while True:
            try:
                view = await self._look()
                term = self._held(view).term
                if view.led:
                    return term
                await self._renew(view)
            except (Unreachable, Refusal):
                if held and self._leads is not None:
                    return self._leads.term
            await asyncio.sleep(AGAIN)

    async def supervisors(self) -> Mapping[int, Place]:
        outage = _Outage()
        while True:
            try:
                membership = (await self._look()).membership
                return membership.roster if membership else {}
            except (Unreachable, Refusal) as error:
                outage.goes_on(error)
            await asyncio.sleep(AGAIN)

    async def superseded(self, leader: Leader) -> Leader:
        """Never returns: with etcd a leader learns of its successor when `agree` is refused."""
        return await asyncio.get_running_loop().create_future()

    async def handle(self, peer: Peer) -> None:
        """Nothing to do: supervisors talk to etcd, not to each other."""

    def close(self) -> None:
        """The lease of a leader ends by itself."""
        for task in self._tasks:
            task.cancel()

    # -- becoming and staying the leader -----------------------------------------------------------------------

    async def _take(self, view: View, after: int) -> None:
        """Tries once to create the leader's key; somebody else may be faster."""
        if after < 0:  # the first supervisor of a new job; what stands there is left of an older one
            new = Membership(secrets.token_hex(8), self._first_term, -1, {self._rank: self._address})
        elif view.membership is None or view.membership.roster.get(self._rank) != self._address:
            raise LostMajority("the job goes on without this supervisor, or has ended")
        else:
            new = view.membership._replace(term=view.membership.term + 1)
        if view.led:  # and most have lost it
            await self._write([Delete(f"{self._prefix}leader")], view)
            return
        self._lease = await self._etcd.grant(self._patience)
        leader = Leader(new.term, self._rank, *self._address[:2])
        await self._write([self._put_leader(leader), self._put(new)], view)

    def _begin(self, leader: Leader, view: View) -> Leader:
        assert view.membership is not None
        self._run, self._leads = view.membership.run, leader
        self._background(self._stay(leader))
        return leader

    async def _stay(self, leader: Leader) -> None:
        """Keeps the lease alive; takes a new one where it ended and nobody else has become the leader."""
        while self._leads == leader:
            with suppress(Unreachable, Refusal, LostMajority, Deposed):
                if not await self._etcd.keep_alive(self._lease):
                    await self._renew(await self._look())
            await asyncio.sleep(self._patience / 4)

    async def _renew(self, view: View) -> None:
        held = self._held(view)
        if not view.led and self._leads is not None:
            self._lease = await self._etcd.grant(self._patience)
            await self._write([self._put_leader(self._leads), self._put(held)], view)

    def _held(self, view: View) -> Membership:
        """The membership as this leader has left it; Deposed where it leads no more."""
        leads, held = self._leads, view.membership
        if leads is None or held is None or (held.run, held.term) != (self._run, leads.term):
            raise Deposed("another supervisor coordinates now")
        if view.leader not in (leads, None):
            raise Deposed("another supervisor coordinates now")
        return held

    def _is_lost(self, view: View) -> bool:
        """Whether most of the membership say that they have lost the leader."""
        if view.membership is None or view.leader is None:
            return False
        return majority([r for r, term in view.lost.items() if term == view.leader.term], view.membership.roster)

    def _is_me(self, leader: Leader) -> bool:
        return leader == (leader.term, self._rank, *self._address[:2])

    async def _mark(self, term: int) -> None:
        lease = await self._etcd.grant(3 * self._patience)
        await self._etcd.write([Put(f"{self._prefix}lost/{self._rank}", str(term), lease)])

    # -- keys --------------------------------------------------------------------------------------------------

    async def _look(self) -> View:
        keys = await self._etcd.read(self._prefix)
        found = {key.removeprefix(self._prefix): entry for key, entry in keys.items()}
        none = Entry("", 0, 0)
        leader, membership = found.get("leader", none), found.get("membership", none)
        view = View(
            Leader(*json.loads(leader.value)) if leader.value else None,
            leader.created,
            Membership.from_text(membership.value) if membership.value else None,
            membership.modified,
            {int(key.removeprefix("lost/")): int(e.value) for key, e in found.items() if key.startswith("lost/")},
        )
        if self._run is not None and view.membership is not None and view.membership.run != self._run:
            raise LostMajority("another job with the same token coordinates by this etcd now")
        return view

    async def _write(self, changes: list[Put | Delete], view: View) -> bool:
        """Makes the changes if the leader and the membership are as in `view`; nothing otherwise."""
        leader, membership = f"{self._prefix}leader", f"{self._prefix}membership"
        return await self._etcd.write(changes, [Created(leader, view.led), Modified(membership, view.changed)])

    def _put(self, membership: Membership) -> Put:
        return Put(f"{self._prefix}membership", membership.to_text())

    def _put_leader(self, leader: Leader) -> Put:
        return Put(f"{self._prefix}leader", json.dumps(leader), self._lease)

    # -- small things ------------------------------------------------------------------------------------------

    async def _learn_run(self) -> None:
        """Which job this is, while its leader is known to live."""
        while self._run is None:
            with suppress(Unreachable, Refusal):
                view = await self._look()
                self._run = view.membership.run if view.membership else None
            await asyncio.sleep(1.0)

    def _still_leads(self, leader: Leader, after: int) -> str:
        where = f"the supervisor of rank {leader.rank} at {leader.host}:{leader.port}"
        if after < 0:
            return f"{where} coordinates another job with the same token by this etcd"
        return f"{where} coordinates the job and cannot be reached from here"

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Outage:
    """How long etcd has not answered."""

    def __init__(self) -> None:
        self._since = asyncio.get_running_loop().time()

    def ended(self) -> None:
        self._since = asyncio.get_running_loop().time()

    def goes_on(self, error: Exception) -> None:
        """LostMajority after ETCD_SECONDS."""
        if asyncio.get_running_loop().time() - self._since > ETCD_SECONDS:
            raise LostMajority(f"{error}; without it nothing can be agreed") from error
