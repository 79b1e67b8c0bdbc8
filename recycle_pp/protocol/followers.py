"""Tracks followers, which copy units from donors while the job continues: returning processes (joiners), members whose
stage will gain layers (receivers of a move, see `moving`), and members that may have to play a worker of another stage
(`understudies`).

followers.add(member, earliest=40)           # a joiner
followers.add(member, layers=[3, 4, 5])      # a receiver; its stage will have these layers
followers.add_understudy(member, worker, elements)       # of this worker, whose stage has these elements
followers.find_donors(committed, generation, live, units, assignment)      # messages to followers and donors
followers.synced(member, step, session)      # records that the follower has all its units in the state after `step`
followers.about_to_join(committed)           # whether some joiners lack only the newest step; if so, wait for them
followers.take_ready(committed)              # the joiners that lack nothing; they become members
followers.drop_late(committed)               # restarts followers that still lack the newest step, with new donors
followers.check(give)                        # restarts followers if a donor no longer holds the units that it sends

A session is one attempt to bring a follower up to date.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from recycle_schedules import Worker

from recycle_pp.wire.messages.lifecycle import Donate, Expect
from recycle_pp.wire.messages.members import Assignment, Member
from recycle_pp.wire.messages.units import UnitId, packed

from .events import Send
from .units import Units

LEAD = 3  # a joiner starts to follow its units this many steps before `earliest`
NOT_YET = -1  # `Follower.prepared` of an understudy that is in step, before it is prepared in this generation
SESSIONS = 1 << 20  # limit on the number of sessions in one generation


@dataclass
class Follower:
    earliest: int  # first step that the joiner may take part in
    layers: list[int] | None = None  # layers that the receiver's stage will have; else None
    worker: Worker | None = None  # the worker whose understudy the follower is; else None
    elements: int = 0  # number of elements of an understudy's units
    donors: dict[Member, list[UnitId]] = field(default_factory=dict)  # donor -> the units that it sends
    synced: int | None = None  # the follower's units are in the state after this step; None until they have arrived
    session: int = -1
    prepared: int | None = None  # newest step whose commit the understudy can complete; None until it is in step

    @property
    def joins(self) -> bool:
        return self.layers is None and self.worker is None

    def restart(self) -> None:
        self.donors, self.synced, self.prepared = {}, None, None


@dataclass
class Followers:
    _by_member: dict[Member, Follower] = field(default_factory=dict)
    _session: int = -1  # number of the newest session; increases, even across coordinators

    def add(self, member: Member, earliest: int = 0, layers: list[int] | None = None) -> None:
        self._by_member[member] = Follower(earliest, layers)

    def add_understudy(self, member: Member, worker: Worker, elements: int) -> None:
        self._by_member[member] = Follower(0, None, worker, elements)

    def resume_understudy(self, member: Member, worker: Worker, donor: Member, session: int) -> None:
        """Continues a session that another coordinator has begun. The understudy is in step."""
        self._by_member[member] = Follower(0, None, worker, donors={donor: []}, session=session, prepared=NOT_YET)

    @property
    def understudies(self) -> dict[Member, Follower]:
        return {member: each for member, each in self._by_member.items() if each.worker is not None}

    def __contains__(self, member: Member) -> bool:
        return member in self._by_member

    def died(self, member: Member) -> None:
        """Removes a follower that is dead. If it was a donor, its followers restart with other donors."""
        self._by_member.pop(member, None)
        for follower in self._by_member.values():
            if member in follower.donors:
                follower.restart()

    def find_donors(
        self, committed: int, generation: int, live: Assignment, units: Units, assignment: Assignment
    ) -> list[Send]:
        """Assigns donors to every follower that needs them now. Returns the messages that begin the sessions.

        live        the worker that each live member plays
        assignment  the worker that each member plays, dead or alive
        """
        out: list[Send] = []
        for member, follower in sorted(self._by_member.items()):
            if follower.donors or committed + LEAD < follower.earliest:
                continue
            serving = Counter(donor for each in self._by_member.values() for donor in each.donors)
            worker = follower.worker or assignment[member]
            layers = units.layout[(stage := worker.stage)]
            if follower.layers is None:
                follower.donors = units.sources(member, stage, live, serving)
            else:
                follower.donors = units.moved(member, follower.layers, live, serving)
                layers = [layer for layer in follower.layers if layer not in layers]
            if follower.donors:
                follower.session = session = self.new_session(generation)
                of = sum(map(len, follower.donors.values()))
                out.append(Send(member, Expect(session, layers, follower.worker, follower.elements)))
                for donor, given in follower.donors.items():
                    early = follower.worker is not None
                    out.append(Send(donor, Donate(member, worker, session, None, packed(given), of, early)))
        return out

    def new_session(self, generation: int) -> int:
        self._session = max(self._session + 1, generation * SESSIONS)
        return self._session

    def synced(self, member: Member, step: int, session: int) -> bool:
        """Records progress of a follower. Returns False if the member is no longer one, or if the session is old,
        because its donors then do not send the next step."""
        follower = self._by_member.get(member)
        if follower is None or not follower.donors or follower.session != session:
            return False
        follower.synced = step
        return True

    def newest(self, member: Member) -> int | None:
        """The step after which this follower has its units; None if it has not received them or follows none."""
        follower = self._by_member.get(member)
        return None if follower is None else follower.synced

    def remove(self, member: Member) -> None:
        """Removes a living follower."""
        del self._by_member[member]

    def check(self, give: Callable[[Mapping[Member, Collection[UnitId]]], bool]) -> None:
        """Restarts followers if their donors no longer hold their units. give: see `Units.give`."""
        for follower in self._by_member.values():
            if follower.donors and not give(follower.donors):
                follower.restart()

    def remove_receivers(self) -> None:
        self._by_member = {member: each for member, each in self._by_member.items() if each.layers is None}

    def restart(self, stages: Collection[int], assignment: Assignment) -> None:
        """Restarts the followers in these stages."""
        for member, follower in self._by_member.items():
            if (follower.worker or assignment[member]).stage in stages:
                follower.restart()

    def about_to_join(self, committed: int) -> bool:
        return any(follower.joins for follower in self._late(committed))

    def take_ready(self, committed: int) -> list[Member]:
        joiners = {member: each for member, each in self._by_member.items() if each.joins}
        ready = [w for w, j in joiners.items() if j.synced == committed and j.earliest <= committed + 1]
        for member in ready:
            del self._by_member[member]
        return sorted(ready)

    def drop_late(self, committed: int) -> None:
        for follower in self._late(committed):
            if follower.worker is None:
                follower.restart()

    def _late(self, committed: int) -> list[Follower]:
        return [f for f in self._by_member.values() if f.synced == committed - 1 and f.earliest <= committed + 1]
