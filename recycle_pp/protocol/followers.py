"""Tracks followers: processes that copy units from donors while the job continues.

followers.add(member, earliest=40)           # a joiner
followers.add(member, layers=[3, 4, 5])      # a receiver; its stage will have these layers
followers.add_understudy(member, worker)       # an understudy of this worker
followers.find_donors(committed, generation, live, units, assignment)      # returns messages to followers and donors
followers.synced(member, step, session)      # records that the follower has all its units in the state after `step`
followers.stream_lost(session, committed)    # restarts the follower of this session
followers.about_to_join(committed)           # whether some joiners lack only the newest step; if so, wait for them
followers.take_ready(committed)              # removes and returns the joiners that are up to date
followers.drop_late(committed)               # restarts joiners and receivers that still lack only the newest step
followers.check(give)                        # restarts followers if a donor no longer holds the units that it sends

There are three kinds. A joiner is a returning process, which follows the units of its stage. A receiver is a member
whose stage will gain layers (`moving`). An understudy is a member that may have to play a worker of another stage
(`understudies`). A session is one attempt to bring a follower up to date. A follower that restarts gets new donors and
a new session.
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
NOT_YET = -1  # `Follower.prepared` of an understudy that is in step, but not prepared in the current generation
SESSIONS = 1 << 20  # limit on the number of sessions in one generation


@dataclass
class Follower:
    earliest: int  # joiners only: first step that the joiner may take part in
    layers: list[int] | None = None  # receivers only: all layers that the stage will have
    worker: Worker | None = None  # understudies only: the worker that the member may have to play
    donors: dict[Member, list[UnitId]] = field(default_factory=dict)  # donor -> the units that it sends
    synced: int | None = None  # all units have arrived, in the state after this step; None until then
    session: int = -1
    prepared: int | None = None  # understudies only: newest step whose commit it can complete; None until it is in step
    kept: int | None = None  # understudies only: newest commit in its copy, if its donor was lost while it was in step

    @property
    def joins(self) -> bool:
        return self.layers is None and self.worker is None

    def restart(self) -> None:
        self.donors, self.synced, self.prepared, self.kept = {}, None, None, None


@dataclass
class Followers:
    _by_member: dict[Member, Follower] = field(default_factory=dict)
    _session: int = -1  # number of the newest session; increases, even across coordinators

    def add(self, member: Member, earliest: int = 0, layers: list[int] | None = None) -> None:
        self._by_member[member] = Follower(earliest, layers)

    def add_understudy(self, member: Member, worker: Worker) -> None:
        self._by_member[member] = Follower(0, None, worker)

    def resume_understudy(self, member: Member, worker: Worker, donor: Member, session: int) -> None:
        """Continues a session of an earlier coordinator, in which the understudy is already in step."""
        self._by_member[member] = Follower(0, None, worker, donors={donor: []}, session=session, prepared=NOT_YET)

    @property
    def understudies(self) -> dict[Member, Follower]:
        return {member: each for member, each in self._by_member.items() if each.worker is not None}

    def __contains__(self, member: Member) -> bool:
        return member in self._by_member

    def died(self, member: Member) -> None:
        """Removes a dead member from the followers. If it was a donor, its followers restart with other donors."""
        self._by_member.pop(member, None)
        for follower in self._by_member.values():
            if member in follower.donors:
                follower.restart()

    def find_donors(
        self, committed: int, generation: int, live: Assignment, units: Units, assignment: Assignment
    ) -> list[Send]:
        """Assigns donors to every follower that needs them now. Returns the messages that begin the sessions.

        live        live member -> the worker that it plays
        assignment  member -> the worker that it plays, for all members, dead or alive
        """
        out: list[Send] = []
        for member, follower in sorted(self._by_member.items()):
            if follower.donors or committed + LEAD < follower.earliest:
                continue
            serving = Counter(donor for each in self._by_member.values() for donor in each.donors)
            worker = follower.worker or assignment[member]
            layers = units.layout[(stage := worker.stage)]
            if follower.worker is not None:
                follower.donors = units.whole(stage, live, serving)
            elif follower.layers is None:
                follower.donors = units.sources(member, stage, live, serving)
            else:
                follower.donors = units.moved(member, follower.layers, live, serving)
                layers = [layer for layer in follower.layers if layer not in layers]
            if follower.donors:
                follower.kept = None  # a new session begins without a copy
                follower.session = session = self.new_session(generation)
                of = sum(map(len, follower.donors.values()))
                elements = units.elements(stage) if follower.worker is not None else 0
                out.append(Send(member, Expect(session, layers, follower.worker, elements)))
                for donor, given in follower.donors.items():
                    early = follower.worker is not None
                    out.append(Send(donor, Donate(member, worker, session, None, packed(given), of, early)))
        return out

    def new_session(self, generation: int) -> int:
        self._session = max(self._session + 1, generation * SESSIONS)
        return self._session

    def synced(self, member: Member, step: int, session: int) -> bool:
        """Records that all units of a follower are in the state after `step`. Returns False, and records nothing, if
        the member is no longer a follower, or if the session is old, because donors of an old session send no further
        steps."""
        follower = self._by_member.get(member)
        if follower is None or not follower.donors or follower.session != session:
            return False
        follower.synced = step
        return True

    def stream_lost(self, session: int, committed: int) -> bool:
        """Restarts the follower of this session, even if its donors are alive. Returns False if the session has
        ended. An understudy that was in step can still take over until its next session or the next commit, because
        the donor may be dead without this coordinator knowing it yet."""
        for follower in self._by_member.values():
            if follower.donors and follower.session == session:
                in_step = follower.prepared is not None
                follower.restart()
                follower.kept = committed if in_step else None
                return True
        return False

    def newest(self, member: Member) -> int | None:
        """The newest step that is contained in all units of the follower. None if units are missing, or if the member
        is not a follower."""
        follower = self._by_member.get(member)
        return None if follower is None else follower.synced

    def remove(self, member: Member) -> None:
        """Removes a follower that is alive. For a dead one, call `died`."""
        del self._by_member[member]

    def check(self, give: Callable[[Mapping[Member, Collection[UnitId]]], bool]) -> None:
        """Restarts followers whose donors no longer hold the units that they send. give: see `Units.give`."""
        for follower in self._by_member.values():
            if follower.donors and not give(follower.donors):
                follower.restart()

    def remove_receivers(self) -> None:
        self._by_member = {member: each for member, each in self._by_member.items() if each.layers is None}

    def restart(self, stages: Collection[int], assignment: Assignment) -> None:
        """Restarts the followers that copy state for a worker of these stages."""
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
