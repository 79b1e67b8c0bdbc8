"""Chooses understudies: members that can take over a stage whose last worker dies, without a checkpoint.

    understudies = Understudies(followers, each=32)      # bytes per element
    understudies.taken_over(live, found, note)          # on a new coordinator
    understudies.choose(live, units, leaving, problem, calm, note)      # chooses and dismisses understudies
    understudies.prepared(member, session, step, committed)     # the member can complete the commit of this step
    understudies.refused(member, session)               # the member has no room for the copy
    understudies.late(step)                             # understudies for which the commit of this step must wait
    member = understudies.heir(stage, committed)        # the member that takes over if the stage's last worker dies

When a stage has only one live worker left, a member of another stage becomes its understudy. It follows all units of
that stage (`followers`), and keeps its own units. It is *in step* once it has the state after some step, and has
received the next step's gradient before that step's commit. From then on every commit waits for the understudy. So it
always has the newest committed state, or can compute it from the gradient and the commit. As soon as the donor has sent
all units, it sends each gradient before the commit. So no commit waits for a gradient that was not sent.

An understudy trains in its own stage until it takes over. Then a new assignment exchanges the roles: the understudy
plays the dead worker, and the dead member plays the understudy's old worker. To all other workers, the understudy's old
worker has died.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from recycle_schedules import Problem, Worker

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
    """The understudies of all stages.

    followers  all followers, including the understudies
    each       bytes per element of an understudy's copy of a stage; 0: no stage gets an understudy
    """

    followers: Followers
    each: int
    _full: set[Member] = field(default_factory=set)  # members found without memory for a copy in this generation
    _expecting: set[Member] = field(default_factory=set)  # members that may have a copy of another stage

    def choose(
        self,
        live: Assignment,
        units: Units,
        leaving: Collection[Member],
        problem: Callable[[], Problem],
        calm: bool,
        note: Noting,
    ) -> None:
        """Dismisses understudies that are no longer needed, and chooses one for each stage with a single live worker,
        if a member can be spared. Prefers members of the stage with the most workers to spare, and then members on a
        host other than that of the single worker.

        leaving  members that leave soon
        problem  returns the planning problem of the live workers; if it has `memory`, the copy must fit into the memory
                 that the understudy's own stage leaves free
        calm     whether no move is in progress. During a move, no stage has an understudy, because the move ends soon
                 and changes the layers
        """
        size = Counter(worker.stage for worker in live.values())
        last = {worker.stage: member for member, worker in live.items() if size[worker.stage] == 1}
        for member, follower in self.followers.understudies.items():
            worker, own = follower.worker, live[member].stage
            assert worker is not None
            alone = live.get(last.get(worker.stage, -1)) == worker
            fits = problem().room(live[member]) >= units.elements(worker.stage) * self.each
            if not (calm and self.each and alone and size[own] > 1 and fits):
                self.followers.remove(member)
                note("understudy_dismissed", member=member, worker=worker, role=live[member])
        spare = size - Counter(live[member].stage for member in self.followers.understudies)
        covered = {each.worker.stage for each in self.followers.understudies.values() if each.worker is not None}
        away = {*leaving, *self._full}
        for stage in sorted(last.keys() - covered) if calm and self.each else ():
            host = units.hosts.get(last[stage])
            free = [m for m in live if m not in self.followers and m not in away and spare[live[m].stage] > 1]
            free.sort(key=lambda m: (-spare[live[m].stage], units.hosts.get(m) == host, -m))
            if not free:
                continue
            worker, elements = live[last[stage]], units.elements(stage)
            needed, room = elements * self.each, {m: problem().room(live[m]) for m in free}
            fitting = [m for m in free if room[m] >= needed]
            if not fitting:
                about = {"needed": needed, "free": int(max(0, room[free[0]]))}
                note("understudy_refused", member=free[0], worker=worker, role=live[free[0]], **about)
                self._full.update(free)
                continue
            member = fitting[0]
            spare[live[member].stage] -= 1
            self.followers.add_understudy(member, worker)
            note("understudy", member=member, worker=worker, role=live[member], elements=elements)

    def taken_over(self, live: Assignment, found: Mapping[Member, Followed], note: Noting) -> None:
        """Called on a new coordinator. Keeps the understudies of stages that still have exactly one live worker.

        found: understudy that is in step -> its copy
        """
        for member, followed in found.items():
            others = [m for m, worker in live.items() if worker.stage == followed.stage]
            if self.each and len(others) == 1 and live[member].stage != followed.stage:
                self.followers.resume_understudy(member, live[others[0]], others[0], followed.session)
                note("understudy_kept", member=member)

    def orders(self, generation: int, live: Assignment) -> list[Send]:
        """Messages that make members drop their copies if they are no longer understudies."""
        gone = {member for member in self._expecting & live.keys() if member not in self.followers}
        self._expecting = {*self.followers.understudies}
        return [Send(member, Expect(self.followers.new_session(generation), [])) for member in sorted(gone)]

    def prepared(self, member: Member, session: int, step: int, committed: int) -> bool:
        """Records that an understudy can complete the commit of `step`. Returns True if it was not in step before.
        Ignores steps before `committed`. The donor of an understudy that is so far behind may have restarted, and then
        does not send gradients before their commits."""
        follower = self.followers.understudies.get(member)
        if follower is None or not follower.donors or follower.session != session or step < committed:
            return False
        new, follower.prepared = follower.prepared is None, step
        return new

    def refused(self, member: Member, session: int) -> Worker | None:
        """Removes an understudy without memory for the copy. Returns the worker that it should have followed; None if
        the member is not an understudy, or if the session is old."""
        follower = self.followers.understudies.get(member)
        if follower is None or follower.session != session:
            return None
        self.followers.remove(member)
        self._full.add(member)
        return follower.worker

    def late(self, step: int) -> list[Member]:
        """The understudies that are in step, but cannot complete the commit of `step` yet."""
        return [m for m, each in self.followers.understudies.items() if each.prepared not in (None, step)]

    def regrouped(self) -> None:
        """Called when a generation begins. All workers vote again, so every understudy must be prepared again. Members
        without enough memory become candidates again, because they may have more memory now."""
        self._full.clear()
        for follower in self.followers.understudies.values():
            follower.prepared = None if follower.prepared is None else NOT_YET

    def restart(self, members: Collection[Member]) -> None:
        """Restarts these understudies, because they have been late for too long."""
        for member in members:
            self.followers.understudies[member].restart()

    def heir(self, stage: int, committed: int) -> Member | None:
        """The understudy of this stage, if it has all commits; else None."""
        for member, each in self.followers.understudies.items():
            if each.worker is not None and each.worker.stage == stage:
                return member if each.prepared is not None or each.kept == committed else None
        return None
