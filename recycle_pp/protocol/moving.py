"""A move: some layers change their stages while the job trains. It is a small rejoin.

    moving = Moving(units, followers)
    moving.begin(MoveWanted(layout, problem), live, note)
    moving.find_donors(committed, generation, live, assignment)     # messages to followers and donors
    moving.about_to_switch(committed, live)             # at a commit: all receivers lack only this step
    moving.due = True                                   # so all workers wait, until no receiver is `late`
    moving.layout_next(committed, live)                 # the layout of the next generation
    moving.announced                                    # the move, while the current generation has its layout
    moving.adopted(committed, live, assignment, note)   # all have reported in this generation; the move is over

A receiver is a live member of a stage that gains layers. It follows units of these layers, as a joiner follows the
units of its stage: all of them, or with `parallel.sharded` its share. The layout changes only in a generation that
begins after a commit for which all workers have waited and which all receivers have applied. So no op of the next step
has run with the old layout.

An announced layout is tentative: if a member dies before all have reported, the next generation has the old layout, and
the switch is tried again at the next commit. An adopted layout is final.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from recycle_pp.wire.messages.lifecycle import Expect
from recycle_pp.wire.messages.members import Assignment, Member
from recycle_pp.wire.messages.units import Layout

from .events import MoveWanted, Send
from .followers import Followers
from .units import Units

NEVER = -9  # a step number before all others

Noting = Callable[..., None]
"""note(name, **fields): adds a note to the current outcome"""


@dataclass
class Moving:
    """
    units      the coordinator's units, with the current layout
    followers  all followers, also the receivers of the move
    move       the open move
    due        whether all workers wait for the generation that will have the layout of the move
    announced  the move, while the current generation has its layout and is not adopted yet
    since      no session begins before a commit after this step: before that, workers may not have the layers of the
               newest adopted layout yet
    """

    units: Units
    followers: Followers
    move: MoveWanted | None = None
    due: bool = False
    announced: MoveWanted | None = None
    since: int = NEVER
    _receivers: dict[int, set[Member]] = field(default_factory=dict)  # by stage
    _expecting: set[Member] = field(default_factory=set)  # members that may have units of layers of other stages

    def begin(self, move: MoveWanted, live: Assignment, note: Noting) -> None:
        """Begins a move in place of the open one. Without one, if the layout is the current one. If it is the layout of
        the open move, only the problem is replaced."""
        if self.move is not None and move.layout == self.move.layout:
            self.move, self.announced = move, self.announced and move
            return
        self.end("replaced", "", note)
        if move.layout != self.units.layout:
            self.move = move
            gains = self._gains
            receivers = {member: gains[worker.stage] for member, worker in live.items() if worker.stage in gains}
            note("move_begun", layout=move.layout, receivers=receivers)

    def end(self, how: str, detail: str, note: Noting) -> None:
        """Drops the open move, if there is one."""
        if self.move is not None:
            note("move_ended", how=how, layout=self.move.layout, detail=detail)
        self.move, self.due = None, False
        self._receivers.clear()
        self.followers.remove_receivers()

    def taken_over(self, committed: int, live: Assignment) -> None:
        """Called on a new coordinator. The last one may have begun a move, which is abandoned."""
        self.since, self._expecting = committed, set(live)

    def find_donors(self, committed: int, generation: int, live: Assignment, assignment: Assignment) -> list[Send]:
        """Begins a session for every follower that needs donors now; see `Followers.find_donors`. Members that are no
        longer receivers drop what has arrived."""
        if committed <= self.since:
            return []
        self._follow_members(live)
        out = self.followers.find_donors(committed, generation, live, self.units, assignment)
        for member in sorted(self._expecting & live.keys()):
            if member not in self.followers:
                out.append(Send(member, Expect(self.followers.new_session(generation), [])))
        self._expecting = set().union(*self._receivers.values())
        return out

    def about_to_switch(self, committed: int, live: Assignment) -> bool:
        """Whether all receivers lack only the newest step."""
        return self._all_at({committed - 1}, live)

    def late(self, committed: int, live: Assignment) -> bool:
        """Whether the workers wait for a receiver that lacks only the newest step."""
        return self.due and self._all_at({committed - 1, committed}, live) and not self._all_at({committed}, live)

    def layout_next(self, committed: int, live: Assignment) -> Layout:
        """The layout of a generation that begins now."""
        self.announced = self.move if self.due and self._all_at({committed}, live) else None
        self.due = False
        return dict(self.units.layout) if self.announced is None else self.announced.layout

    def adopted(self, committed: int, live: Assignment, assignment: Assignment, note: Noting) -> None:
        """Gives the stages the announced layers. The move is over."""
        assert self.announced is not None
        self.followers.restart(self.units.relayout(self.announced.layout, live), assignment)
        self.announced, self.since = None, committed
        self._expecting.clear()
        self.end("switched", "", note)

    @property
    def _gains(self) -> Layout:
        """stage -> the layers that it will gain, if any"""
        then, now = {} if self.move is None else self.move.layout, self.units.layout
        found = {stage: [layer for layer in layers if layer not in now[stage]] for stage, layers in then.items()}
        return {stage: layers for stage, layers in found.items() if layers}

    def _all_at(self, steps: set[int], live: Assignment) -> bool:
        """Whether every live member of a stage that gains layers has its units, in the state after one of `steps`."""
        for stage in self._gains:
            members = _members(stage, live)
            if members != self._receivers.get(stage) or any(self.followers.newest(m) not in steps for m in members):
                return False
        return self.move is not None

    def _follow_members(self, live: Assignment) -> None:
        """Makes all live members of the stages that gain layers receivers. With sharded state their shares depend on
        each other, so those of a stage restart if one of them is new or gone."""
        for stage in self._gains:
            assert self.move is not None
            members = _members(stage, live)
            new = {member for member in members if member not in self.followers}
            if self.units.sharded and (new or members != self._receivers.get(stage)):
                new = members
            for member in sorted(new):
                self.followers.add(member, layers=self.move.layout[stage])
            self._receivers[stage] = members


def _members(stage: int, live: Assignment) -> set[Member]:
    return {member for member, worker in live.items() if worker.stage == stage}
