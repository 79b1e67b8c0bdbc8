"""The units of its stage's state that one worker has, as it reports them.

holdings = Holdings(me=1, sizes=[...], loaded=-1)     # `participant.holdings`
holdings.followed(step, units)                        # before it is a member: the state of these units after a step
holdings.reported()                                   # its part of a report
holdings.adopt(shares)                                # who holds what from now on, as the coordinator says
holdings.took(unit); holdings.settled()               # a copy is here; all of them
holdings.commit(step, savers)                         # a step is agreed
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from recycle_pp.wire.messages.workers import Holds, Shares

NOTHING = -9  # as a step: none that could be agreed on


@dataclass
class Holdings:
    """What one worker has of its stage's state. Pure; guarded as its Participant is.

    me       its pipeline
    sizes    elements of every unit of the stage
    loaded   the step after which it has all state, with which it began; None: no longer
    weights  the newest step of which it has all weights; one less if it has the exponents, but not all weights
    units    that it holds as they are after the newest committed step
    shares   those of the present generation; None before the first one
    mine     units that it has to hold by these shares, ascending
    saves    step -> the units that it saves, of commits with a checkpoint
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

    def followed(self, step: int, units: Collection[int]) -> None:
        """It has the state of these units after that step, and the exponents."""
        self.units, self.loaded, self._since = set(units), None, step
        self.weights = step if len(self.units) == len(self.sizes) else step - 1

    def join(self, committed: int) -> None:
        """Its first generation: what it has is of use only if no step has been agreed since."""
        if self._since != committed:
            self.units, self.loaded, self.weights = set(), None, NOTHING

    def adopt(self, shares: Shares) -> None:
        self.shares = shares
        self.mine = [unit for unit, holders in enumerate(shares.holders) if self.me in holders]

    def informed(self, committed: int) -> None:
        """It has the exponents after the newest step. Before the first copy: every holder of a unit has them."""
        self.weights = max(self.weights, committed - 1)

    def took(self, unit: int) -> None:
        """A copy is complete here."""
        self.units.add(unit)

    def settled(self) -> None:
        """It holds all that it has to, and gives up the rest of its initial state."""
        self.units |= set(self.mine)
        self.loaded = None

    def gathered(self, step: int) -> None:
        """It has all weights after that step, which is the newest, or one that was applied before it is agreed."""
        self.weights = step

    def taken_back(self, committed: int) -> None:
        """An update is undone by all holders of its units. Of other units it may have weights after that update."""
        self.weights = min(self.weights, committed - 1)

    def distrust(self, committed: int) -> None:
        """Weights that it has received may be wrong: it needs all of them again."""
        self.weights = min(self.weights, committed - 1)

    def commit(self, step: int, savers: Collection[int]) -> None:
        """A step is agreed, so every worker holds its units; other units that it holds are out of date from here on.

        savers: the workers of the stage that save a checkpoint of that step, if any."""
        assert self.shares is not None
        self.units, self.loaded = set(self.mine), None
        if savers:
            first = [next((p for p in holders if p in savers), None) for holders in self.shares.holders]
            self.saves[step] = [unit for unit, saver in enumerate(first) if saver == self.me]
