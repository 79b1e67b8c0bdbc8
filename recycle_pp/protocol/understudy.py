"""The state of another stage that a member follows as its understudy (`understudies`).

    following = Understudy(worker, session)     # `participant.understudy`; `units` follow when the stage is built
    following.restart()                         # the donor sends the state anew
    following.reached(step)                     # all units are in their state after this step
    following.received(step, generation)        # the gradient with which the donor votes in this generation
    following.committed(commit)                 # the job has committed a step
    following.take_due()                        # commits to apply, oldest first; their gradients are here

The gradient of a step and its commit come from different processes, in any order. A commit of another generation than
that of the gradient waits for a newer gradient, because the two sums may differ in their last bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from recycle_schedules import Worker

from recycle_pp.wire.messages.steps import Commit
from recycle_pp.wire.messages.units import UnitId
from recycle_pp.wire.messages.workers import Followed

NOTHING = -9  # a step before all others
KEPT = 8  # commits that may wait; a state that arrives is at most a few steps old


@dataclass
class Understudy:
    """
    worker  the worker that the member may have to play
    session see `Expect`
    units   all units of that worker's stage
    step    newest committed step whose update is due or applied; NOTHING until all units have arrived
    early   later step -> generation of its newest gradient
    """

    worker: Worker
    session: int
    units: Sequence[UnitId] = ()
    step: int = NOTHING
    early: dict[int, int] = field(default_factory=dict)
    _commits: list[Commit] = field(default_factory=list)  # of later steps
    _due: list[Commit] = field(default_factory=list)

    def restart(self) -> None:
        self.step = NOTHING
        self.early.clear()
        self._due.clear()

    def reached(self, step: int) -> None:
        """By parts of the state, or by gradients that come after their commit."""
        self.step = step
        self.early = {later: of for later, of in self.early.items() if later > step}
        self._commits = [commit for commit in self._commits if commit.step > step]
        self._due.clear()
        self._settle()

    def received(self, step: int, generation: int) -> bool:
        """Returns whether no other gradient is missing for the commit of this step."""
        if self.step == NOTHING or step <= self.step:
            return False
        self.early[step] = generation
        self._settle()
        return all(later in self.early for later in range(self.step + 1, step))

    def committed(self, commit: Commit) -> None:
        self._commits = [*self._commits, commit][-KEPT:]
        self._settle()

    def take_due(self) -> list[Commit]:
        due, self._due = self._due, []
        return due

    @property
    def state(self) -> Followed | None:
        """What it follows, for a new coordinator; None until all units have arrived."""
        return None if self.step == NOTHING else Followed(self.worker.stage, self.session, self.step, dict(self.early))

    def _settle(self) -> None:
        while self._commits and self.step != NOTHING:
            commit = self._commits[0]
            if commit.step != self.step + 1 or self.early.get(commit.step) != commit.generation:
                return
            self._due.append(self._commits.pop(0))
            self.step = commit.step
            del self.early[commit.step]


def reaches(state: Followed, committed: int, commit: Commit | None) -> bool:
    """Whether an understudy in this state has the state after step `committed`, once it has received `commit`, the
    commit of that step."""
    if state.step == committed:
        return True
    return state.step == committed - 1 and commit is not None and state.early.get(committed) == commit.generation
