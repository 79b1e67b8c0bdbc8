"""Tracks which commits an understudy can apply to its copy of another stage's state (see `understudies`).

    following = Understudy(worker, session)     # `participant.understudy`; `units` is set once the stage is built
    following.restart()                         # the donor sends the state again
    following.reached(step)                     # all units are in the state after this step
    following.received(step, generation)        # the gradient of the donor's vote in this generation has arrived
    following.committed(commit)                 # the job has committed a step
    following.take_due()                        # commits to apply, oldest first; their gradients have arrived

The gradient of a step and its commit come from different processes, in any order. If they are from different
generations, the commit waits for a newer gradient, because sums of two generations may differ in their last bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from recycle_schedules import Worker

from recycle_pp.wire.messages.steps import Commit
from recycle_pp.wire.messages.units import UnitId
from recycle_pp.wire.messages.workers import Followed

NOTHING = -9  # a step before all others
KEPT = 8  # limit on waiting commits; enough, because an arriving state is at most a few steps old


@dataclass
class Understudy:
    """The progress of one understudy.

    worker  the worker that the member may have to play
    session see `Expect`
    units   all units of that worker's stage
    step    newest committed step whose update is due or applied; NOTHING until all units have arrived
    early   a step after `step` whose gradient has arrived -> generation of that gradient
    """

    worker: Worker
    session: int
    units: Sequence[UnitId] = ()
    step: int = NOTHING
    early: dict[int, int] = field(default_factory=dict)
    _commits: list[Commit] = field(default_factory=list)  # commits of later steps, oldest first
    _due: list[Commit] = field(default_factory=list)  # commits to apply, oldest first

    def restart(self) -> None:
        self.step = NOTHING
        self.early.clear()
        self._due.clear()

    def reached(self, step: int) -> None:
        """Records that all units are in the state after `step`. The donor has sent either this state, or the gradients
        of committed steps that lead to it."""
        self.step = step
        self.early = {later: of for later, of in self.early.items() if later > step}
        self._commits = [commit for commit in self._commits if commit.step > step]
        self._due.clear()
        self._settle()

    def received(self, step: int, generation: int) -> bool:
        """Records that the gradient of `step` has arrived. Returns whether the understudy can complete the commit of
        `step`, because the gradients of all earlier steps have arrived too."""
        if self.step == NOTHING or step <= self.step:
            return False
        self.early[step] = generation
        self._settle()
        return all(later in self.early for later in range(self.step + 1, step))

    def committed(self, commit: Commit) -> None:
        """Records a commit. Ignores it if the arrived state contains its step, because the donor's state may arrive
        before the coordinator's commit."""
        if commit.step > self.step:
            self._commits = [*self._commits, commit][-KEPT:]
            self._settle()

    def take_due(self) -> list[Commit]:
        due, self._due = self._due, []
        return due

    @property
    def state(self) -> Followed | None:
        """The state of the copy, for a new coordinator; None until all units have arrived."""
        return None if self.step == NOTHING else Followed(self.worker.stage, self.session, self.step, dict(self.early))

    def _settle(self) -> None:
        """Makes commits due if they are next in order and their gradients have arrived."""
        while self._commits and self.step != NOTHING:
            commit = self._commits[0]
            if commit.step != self.step + 1 or self.early.get(commit.step) != commit.generation:
                return
            self._due.append(self._commits.pop(0))
            self.step = commit.step
            del self.early[commit.step]


def reaches(state: Followed, committed: int, commit: Commit | None) -> bool:
    """Whether a copy contains step `committed`, or will contain it once the understudy receives `commit`.

    state   the understudy's report about its copy
    commit  the commit of step `committed`; None if no process has it
    """
    if state.step == committed:
        return True
    return state.step == committed - 1 and commit is not None and state.early.get(committed) == commit.generation
