"""Chooses understudies: members that can take over a stage whose last worker dies, without a checkpoint.

    understudies = Understudies(followers, wanted=True)
    understudies.taken_over(live, found, note)          # on a new coordinator
    understudies.choose(live, units, leaving, calm, note)       # begins or ends the following of some members
    understudies.prepared(member, session, step, committed)     # it can complete the commit of this step
    understudies.refused(member, session)               # it has no room
    understudies.late(step)                             # those for which the commit of this step must wait
    member = understudies.heir(stage)                   # the member that takes over the stage of a dead last worker

When a stage is down to its last live worker, a member of the stage with the most live workers follows all units of that
stage, beside its own (`followers`). It is in step once it has the state after some step and then the next step's
gradient before the commit. From then on the job commits no step without it: the understudy then always has the newest
committed state, or can make it from the gradient and the commit. The donor sends gradients early from the moment when
it has sent all units, so no commit waits for a gradient that does not come.

An understudy trains like its peers until it takes over. In a new assignment it then plays the dead worker, and the dead
member plays the worker that the understudy has been. All other workers see the death of that worker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from recycle_schedules import Worker

from recycle_pp.wire.messages.lifecycle import Expect
from recycle_pp.wire.messages.members import Assignment, Member
from recycle_pp.wire.messages.workers import Followed

from .events import Send
from .followers import NOT_YET, Followers
from .units import Units

Noting = Callable[..., None]
"""note(name, **fields): adds a note to the current outcome"""


@dataclass
class Understudies:
    """
    followers  all followers, also the understudies
    wanted     whether stages get understudies at all
    """

    followers: Followers
    wanted: bool
    _full: set[Member] = field(default_factory=set)  # members without room for the units of another stage
    _expecting: set[Member] = field(default_factory=set)  # members that may have units of another stage

    def choose(self, live: Assignment, units: Units, leaving: Collection[Member], calm: bool, note: Noting) -> None:
        """Ends the following of members that are no longer needed, and gives each stage with one live worker an
        understudy if there is one to spare. It is on another host than that worker, if possible.

        leaving: members that leave soon. calm: whether no layers move; otherwise no stage
            has an understudy, because the move ends soon and changes the layers"""
        size = Counter(worker.stage for worker in live.values())
        last = {worker.stage: member for member, worker in live.items() if size[worker.stage] == 1}
        for member, follower in self.followers.understudies.items():
            worker, own = follower.worker, live[member].stage
            assert worker is not None
            if not (calm and self.wanted) or live.get(last.get(worker.stage, -1)) != worker or size[own] == 1:
                self.followers.remove(member)
                note("understudy_dismissed", member=member, worker=worker, role=live[member])
        spare = size - Counter(live[member].stage for member in self.followers.understudies)
        covered = {each.worker.stage for each in self.followers.understudies.values() if each.worker is not None}
        away = {*leaving, *self._full}
        for stage in sorted(last.keys() - covered) if calm and self.wanted else ():
            host = units.hosts.get(last[stage])
            free = [m for m in live if m not in self.followers and m not in away and spare[live[m].stage] > 1]
            if free:
                member = min(free, key=lambda m: (-spare[live[m].stage], units.hosts.get(m) == host, -m))
                worker, elements = live[last[stage]], units.elements(stage)
                spare[live[member].stage] -= 1
                self.followers.add_understudy(member, worker, elements)
                note("understudy", member=member, worker=worker, role=live[member], elements=elements)

    def taken_over(self, live: Assignment, found: Mapping[Member, Followed], note: Noting) -> None:
        """Called on a new coordinator. The members in `found` that are in step with the last worker of a stage stay its
        understudies."""
        for member, followed in found.items():
            others = [m for m, worker in live.items() if worker.stage == followed.stage]
            if self.wanted and len(others) == 1 and live[member].stage != followed.stage:
                self.followers.resume_understudy(member, live[others[0]], others[0], followed.session)
                note("understudy_kept", member=member)

    def orders(self, generation: int, live: Assignment) -> list[Send]:
        """Makes members that are no longer understudies drop their copies."""
        gone = {member for member in self._expecting & live.keys() if member not in self.followers}
        self._expecting = {*self.followers.understudies}
        return [Send(member, Expect(self.followers.new_session(generation), [])) for member in sorted(gone)]

    def prepared(self, member: Member, session: int, step: int, committed: int) -> bool:
        """Records that an understudy can complete the commit of `step`. Returns whether it is in step only from now on.
        A lag of more than one step does not count: its donor may have given up and begun again, so that no early
        gradient follows."""
        follower = self.followers.understudies.get(member)
        if follower is None or not follower.donors or follower.session != session or step < committed:
            return False
        new, follower.prepared = follower.prepared is None, step
        return new

    def refused(self, member: Member, session: int) -> Worker | None:
        """Removes an understudy without room. Returns the worker that it should have followed; None if it is not an
        understudy, or if the session is old."""
        follower = self.followers.understudies.get(member)
        if follower is None or follower.session != session:
            return None
        self.followers.remove(member)
        self._full.add(member)
        return follower.worker

    def died(self, member: Member) -> None:
        self._full.discard(member)

    def late(self, step: int) -> list[Member]:
        return [m for m, each in self.followers.understudies.items() if each.prepared not in (None, step)]

    def regrouped(self) -> None:
        """A new generation begins, and all workers vote again."""
        for follower in self.followers.understudies.values():
            follower.prepared = None if follower.prepared is None else NOT_YET

    def restart(self, members: Collection[Member]) -> None:
        """Begins anew with these understudies, because they are late for too long."""
        for member in members:
            self.followers.understudies[member].restart()

    def heir(self, stage: int) -> Member | None:
        """The understudy that is in step with this stage."""
        for member, each in self.followers.understudies.items():
            if each.worker is not None and each.worker.stage == stage and each.prepared is not None:
                return member
        return None
