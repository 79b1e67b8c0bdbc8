"""Decides when an island cuts its delta and when it applies a round (`recycle_pp.islands`).

    rounds = OuterRounds(steps=100, delay=1, max_local=200)
    rounds.begin(state)                        # the position in the checkpoint, at a start
    rounds.ready(member, 3, {2: 300})          # a worker has computed theta after 3 rounds
    rounds.behind(live, member)                # then these must compute a newer theta: {member: number of rounds}
    rounds.waits(live, step)                   # whether the commit of this step must wait for theta
    order = rounds.commit(live, step)          # the part of the commit message that concerns the rounds

All workers of an island apply a round in the same commit, so peers stay equal, and a death during a round needs no
special handling. Every commit contains the position, so a new coordinator continues from there. A worker keeps the
theta that it has reported until it is applied, or until another worker has a newer one. Pure: no clock, no store.

A delta is cut after `steps` steps, and applied `delay` steps later, before the update of that step. If theta is late,
the island continues with its own weights. It waits once it has made `max_local` steps since it began the round.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import msgspec

from recycle_pp.wire.messages.islands import OuterOrder, OuterState
from recycle_pp.wire.messages.members import Member
from recycle_pp.wire.messages.units import UnitId


class OuterRounds:
    """state: the position after the newest commit."""

    def __init__(self, steps: int, delay: int, max_local: int) -> None:
        self.steps, self.delay, self.max_local = steps, delay, max_local
        self.state = OuterState()
        self._ready: dict[Member, int] = {}  # member -> number of rounds in the theta that it has computed
        self._lacking: dict[UnitId, set[Member]] = {}  # unit -> workers that lack its cut delta in this generation
        self._lost = False  # whether the cut delta is lost

    def begin(self, state: OuterState) -> None:
        """Continues from this position."""
        self.state, self._ready, self._lost = state, {}, False

    def ready(self, member: Member, applied: int, mine: Mapping[int, int]) -> None:
        """Records that a worker has computed theta after `applied` rounds.

        mine: see `RoundReady`. A process of an earlier start may have completed a delta after this start looked
        """
        self._ready[member] = applied
        found = {number: steps for number, steps in mine.items() if number >= self.state.applied}
        self.state = msgspec.structs.replace(self.state, mine={**self.state.mine, **found})

    def regrouped(self) -> None:
        """Called for a new generation. Every worker repeats its reports, because it may hold different units now."""
        self._ready.clear()
        self._lacking.clear()

    def lacks(self, member: Member, sent: int, units: Iterable[tuple[UnitId, Collection[Member]]]) -> None:
        """Records that a worker lacks units of the delta that was cut after `sent` steps, because it joined later. If
        all holders of a unit lack it, the delta is lost, and the island cuts another one.

        units: each unit that it lacks, with all its holders
        """
        for unit, holders in units:
            lacking = self._lacking.setdefault(unit, set())
            lacking.add(member)
            self._lost = self._lost or (self.state.sent == sent and lacking >= set(holders))

    def behind(self, live: Collection[Member], member: Member) -> dict[Member, int]:
        """member -> number of rounds in the newest theta. Contains the members that have reported an older theta and do
        not know yet that a newer one exists.

        member: the one that has just reported
        """
        goal = self._goal(live)
        if self._ready[member] < goal:
            return {member: goal}
        if sum(self._ready.get(of) == goal for of in live) > 1:
            return {}
        return {of: goal for of in sorted(live) if self._ready.get(of, goal) < goal}

    def _goal(self, live: Collection[Member]) -> int:
        return max((self._ready.get(member, 0) for member in live), default=0)

    def applies(self, live: Collection[Member], step: int) -> bool:
        """Whether the commit of this step applies a round."""
        goal, sent = self._goal(live), self.state.sent
        agreed = goal > self.state.applied and all(self._ready.get(member) == goal for member in live)
        # For rounds before `goal`, an earlier start may have cut deltas after more steps than this start has made.
        # Repeat these steps before theta contains the deltas, so that no sample counts twice.
        repeats = any(number < goal and steps > step for number, steps in self.state.mine.items())
        return agreed and not repeats and (sent is None or step >= sent + self.delay - 1)

    def waits(self, live: Collection[Member], step: int) -> bool:
        """Whether the commit of this step must wait until a round can be applied."""
        late = self.state.sent is not None and step >= max(
            [self.state.begun + self.max_local, *self.state.mine.values()]
        )
        return late and not self._lost and not self.applies(live, step)

    def commit(self, live: Collection[Member], step: int, last: bool = False) -> OuterOrder:
        """Decides what the commit of `step` does. last: whether the job ends with it; if so, no delta is cut"""
        state = self.state
        apply = self._goal(live) if self.applies(live, step) else None
        if apply is not None:
            on_time = state.sent is not None and step < state.sent + self.delay
            begun = state.sent if on_time and state.sent is not None else step
            mine = {number: steps for number, steps in state.mine.items() if number >= apply}
            state = OuterState(apply, begun, None, mine)
        elif self._lost:
            state = msgspec.structs.replace(state, sent=None)
        self._lost = False
        before = state.mine.get(state.applied)
        if before is not None and before <= step and state.sent is None:  # an earlier start has cut this delta
            state = msgspec.structs.replace(state, sent=before)
        due = state.begun + self.steps if before is None else before
        cut = state.sent is None and step + 1 >= due and not last
        if cut:
            state = msgspec.structs.replace(state, sent=step + 1)
        self.state = state
        return OuterOrder(state, apply, cut, step + 1 - state.begun if cut else 0)
