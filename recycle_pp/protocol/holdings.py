"""The units that one worker holds, as it reports them.

holdings = Holdings(me=1, sizes=[...], loaded=-1)     # `participant.holdings`
holdings.caught_up(step, units)                       # before it is a member: it has these units after that step
holdings.reported()                                   # its part of a report
holdings.adopt(shares)                                # new holders, from the coordinator
holdings.took(unit); holdings.settled()               # one copy has arrived; all have arrived
holdings.commit(step, savers)                         # a step is committed
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from recycle_pp.wire.messages.generations import Holds, Shares

NOTHING = -9  # a step number before all others


@dataclass
class Holdings:
    """The state that one worker holds. Pure, and guarded by the lock of its Participant.

    me       its pipeline
    sizes    elements of every unit of the stage
    loaded   the step of its initial state, which includes all units; None once it is dropped
    weights  newest step of which it has all weights; one less if it has the exponents but not all weights
    units    units that it holds in their state after the newest committed step
    shares   of the current generation; None before the first one
    mine     units that it must hold according to the shares, ascending
    saves    step -> units that it saves, for commits with a checkpoint
    """

    me: int
    sizes: list[int]
    loaded: int | None
    weights: int = NOTHING
    units: set[int] = field(default_factory=set)
    shares: Shares | None = None
    mine: list[int] = field(default_factory=list)
    saves: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.weights = NOTHING if self.loaded is None else self.loaded
        self._since = self.loaded  # the step of `units`, before this worker is a member

    def reported(self) -> Holds:
        return Holds(self.sizes, sorted(self.units), self.loaded, self.weights)

    def caught_up(self, step: int, units: Collection[int]) -> None:
        """The worker has the state of these units after that step, and the exponents."""
        self.units, self.loaded, self._since = set(units), None, step
        self.weights = step if len(self.units) == len(self.sizes) else step - 1

    def join(self, committed: int) -> None:
        """Its first generation. Drops its state if a step has been committed since."""
        if self._since != committed:
            self.units, self.loaded, self.weights = set(), None, NOTHING

    def adopt(self, shares: Shares) -> None:
        self.shares = shares
        self.mine = [unit for unit, holders in enumerate(shares.holders) if self.me in holders]

    def informed(self, committed: int) -> None:
        """The worker has the exponents after the newest step. Call it before `took`: holders have exponents."""
        self.weights = max(self.weights, committed - 1)

    def took(self, unit: int) -> None:
        """A copy is complete."""
        self.units.add(unit)

    def settled(self) -> None:
        """The worker holds all its units, and drops the rest of its initial state."""
        self.units |= set(self.mine)
        self.loaded = None

    def gathered(self, step: int) -> None:
        """The worker has all weights after that step: the newest one, or one that was applied before its commit."""
        self.weights = step

    def taken_back(self, committed: int) -> None:
        """All holders have undone an update. This worker may have received weights after that update."""
        self.weights = min(self.weights, committed - 1)

    def distrust(self, committed: int) -> None:
        """Received weights may be wrong, so all of them are needed again."""
        self.weights = min(self.weights, committed - 1)

    def commit(self, step: int, savers: Collection[int]) -> None:
        """A step is committed, so every worker holds its units. Other units are out of date.

        savers: pipelines of the stage's workers that save a checkpoint of that step; may be empty"""
        assert self.shares is not None
        self.units, self.loaded = set(self.mine), None
        if savers:
            first = [next((p for p in holders if p in savers), None) for holders in self.shares.holders]
            self.saves[step] = [unit for unit, saver in enumerate(first) if saver == self.me]
