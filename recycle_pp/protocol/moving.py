"""Moves layers to other stages while the job trains.

    moving = Moving(units, followers)
    moving.begin(MoveWanted(layout, problem), live, note)
    moving.find_donors(committed, generation, live, assignment)     # messages to followers and donors
    moving.about_to_switch(committed, live)             # at a commit: whether all receivers lack only this step
    moving.due = True                                   # all workers wait now, until no receiver is `late`
    moving.layout_next(committed, live)                 # the layout of the next generation
    moving.announced                                    # the move, if the current generation has its layout
    moving.adopted(committed, live, assignment, note)   # all members have reported; switches the layout, ends the move

A receiver is a live member of a stage that gains layers. It follows the units of these layers, which means that it
copies them and then applies each step to its copies. With `parallel.sharded` it follows only its share. To change the
layout, all workers wait after a commit until every receiver has applied that step. Then a generation with the new
layout begins. So no op of the next step has run with the old layout.

An announced layout is tentative. If a member dies before all have reported, the next generation has the old layout, and
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
    """The unfinished move, if there is one.

    units      the coordinator's units, with the current layout
    followers  all followers, including the receivers of the move
    move       the unfinished move; None if there is none
    due        whether all workers wait for the generation that will have the layout of the move
    announced  the move, from the announcement of a generation with its layout until all members have reported; else
               None
    since      the step after whose commit the current layout was adopted, see `settling`
    """

    units: Units
    followers: Followers
    move: MoveWanted | None = None
    due: bool = False
    announced: MoveWanted | None = None
    since: int = NEVER
    _receivers: dict[int, set[Member]] = field(default_factory=dict)  # stage -> its receivers
    _expecting: set[Member] = field(default_factory=set)  # members that may have received units of a move

    def begin(self, move: MoveWanted, live: Assignment, note: Noting) -> None:
        """Begins a move, and drops the unfinished one. If `move` has the current layout, only drops the unfinished one.
        If it has the layout of the unfinished move, that move continues with the new problem."""
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
        """Drops the unfinished move, if there is one."""
        if self.move is not None:
            note("move_ended", how=how, layout=self.move.layout, detail=detail)
        self.move, self.due = None, False
        self._receivers.clear()
        self.followers.remove_receivers()

    def taken_over(self, committed: int, live: Assignment) -> None:
        """Called on a new coordinator. Abandons a move that the previous coordinator may have begun."""
        self.since, self._expecting = committed, set(live)

    def settling(self, committed: int) -> bool:
        """Whether some workers may not have built the newest layout yet. A new session would make them drop units that
        they have received for this layout, so no session begins or ends before the next commit."""
        return committed <= self.since

    def find_donors(self, committed: int, generation: int, live: Assignment, assignment: Assignment) -> list[Send]:
        """Begins a session for every follower that needs donors now (`Followers.find_donors`), and makes members that
        are no longer receivers drop the units that they have received. Do not call this while `settling`."""
        self._follow_members(live)
        out = self.followers.find_donors(committed, generation, live, self.units, assignment)
        for member in sorted(self._expecting & live.keys()):
            if member not in self.followers:
                out.append(Send(member, Expect(self.followers.new_session(generation), [])))
        self._expecting = set().union(*self._receivers.values())
        return out

    def about_to_switch(self, committed: int, live: Assignment) -> bool:
        """Whether there is a move and all its receivers lack only step `committed`."""
        return self._all_at({committed - 1}, live)

    def late(self, committed: int, live: Assignment) -> bool:
        """Whether all workers wait for the new layout, and some receivers still lack step `committed`, but no earlier
        one."""
        return self.due and self._all_at({committed - 1, committed}, live) and not self._all_at({committed}, live)

    def layout_next(self, committed: int, live: Assignment) -> Layout:
        """The layout of a generation that begins now. This is the layout of the move if all workers wait for it and no
        receiver lacks a step, else the current one. Also sets `announced`."""
        self.announced = self.move if self.due and self._all_at({committed}, live) else None
        self.due = False
        return dict(self.units.layout) if self.announced is None else self.announced.layout

    def adopted(self, committed: int, live: Assignment, assignment: Assignment, note: Noting) -> None:
        """Switches to the announced layout, which ends the move."""
        assert self.announced is not None
        self.followers.restart(self.units.relayout(self.announced.layout, live), assignment)
        self.announced, self.since = None, committed
        self._expecting.clear()
        self.end("switched", "", note)

    @property
    def _gains(self) -> Layout:
        """stage -> the layers that it will gain, for stages that gain layers."""
        then, now = {} if self.move is None else self.move.layout, self.units.layout
        found = {stage: [layer for layer in layers if layer not in now[stage]] for stage, layers in then.items()}
        return {stage: layers for stage, layers in found.items() if layers}

    def _all_at(self, steps: set[int], live: Assignment) -> bool:
        """Whether there is a move, and each live member of a stage that gains layers has its units of these layers, in
        the state after one of `steps`."""
        for stage in self._gains:
            members = _members(stage, live)
            if members != self._receivers.get(stage) or any(self.followers.newest(m) not in steps for m in members):
                return False
        return self.move is not None

    def _follow_members(self, live: Assignment) -> None:
        """Adds every live member of a stage that gains layers as a receiver. With sharded state, the shares of the
        receivers of a stage depend on each other, so all of them restart if one is new or gone."""
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
