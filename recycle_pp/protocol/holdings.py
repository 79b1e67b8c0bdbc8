"""Tracks which units one worker holds. The worker reports them to the coordinator.

holdings = Holdings(me=1, all=layout.ids, loaded=-1)  # `participant.holdings`
holdings.caught_up(step, units)                       # a joiner has received these units in their state after `step`
holdings.arriving = step, units                       # units of layers that the stage will gain have arrived
holdings.reported(layers, committed)                  # the units of these layers that it holds, for the worker's report
holdings.relayout(units, committed)                   # the layers of the stage have changed
holdings.adopt(shares)                                # new holders, from the coordinator
holdings.took(unit); holdings.settled()               # the copy of one unit has arrived; all copies have arrived
holdings.commit(step, savers)                         # a step is committed
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from recycle_pp.wire.messages.generations import Holds, Shares
from recycle_pp.wire.messages.members import Member
from recycle_pp.wire.messages.units import UnitId, packed

NOTHING = -9  # a step before all others


@dataclass
class Holdings:
    """The state that one worker holds. Not thread-safe; callers hold the lock of the worker's Participant.

    Exponents are those of the fixed-point gradient sums (`numerics`).

    me       number of the member
    all      all units of the worker's stage
    loaded   n if the worker started with all units in the state after step n; None once that state is dropped
    weights  n if the worker has all weights after step n; n - 1 if it has the exponents after step n, but not all
             weights
    units    units that the worker holds in their state after the newest committed step
    shares   holders of the stage's units in the current generation; None before the first generation
    mine     units that the worker must hold according to `shares`, in the stage's order
    saves    step -> units that the worker saves, for commits with a checkpoint
    arriving (step, units): units of layers that the stage will gain, and the step of their state
    """

    me: Member
    all: Collection[UnitId]
    loaded: int | None
    weights: int = NOTHING
    units: set[UnitId] = field(default_factory=set)
    shares: Shares | None = None
    mine: list[UnitId] = field(default_factory=list)
    saves: dict[int, list[UnitId]] = field(default_factory=dict)
    arriving: tuple[int, Collection[UnitId]] = NOTHING, ()

    def __post_init__(self) -> None:
        self.weights = NOTHING if self.loaded is None else self.loaded
        self._since = self.loaded  # the worker's state is the one after this step; used only by `join`

    def reported(self, layers: Collection[int] | None = None, committed: int = NOTHING) -> Holds:
        """The held state, for the worker's report.

        layers: the layers of the stage in a generation that begins after step `committed`; None: the current ones
        """
        units, weights = (self.units, self.weights) if layers is None else self._of(layers, committed)
        return Holds(packed(sorted(units)), self.loaded, weights)

    def relayout(self, all: Collection[UnitId], committed: int) -> None:
        """Records that the worker's stage now has the units `all`, after step `committed`."""
        self.units, self.weights = self._of({unit.layer for unit in all}, committed)
        if self.units.issuperset(all):
            self.weights = committed
        self.all, self.arriving = all, (NOTHING, ())

    def _of(self, layers: Collection[int], committed: int) -> tuple[set[UnitId], int]:
        """(held units, `weights`) if the stage has these layers after step `committed`. Any unit of a gained layer
        brings the exponents of the layer."""
        step, arrived = self.arriving
        came = {unit for unit in arrived if unit.layer in layers} if step == committed else set()
        units, gained = came | {unit for unit in self.units if unit.layer in layers}, {*layers}
        gained -= {unit.layer for unit in self.all}
        if not gained <= {unit.layer for unit in came}:
            return units, NOTHING
        return units, min(self.weights, committed - 1) if gained else self.weights

    def caught_up(self, step: int, units: Collection[UnitId]) -> None:
        """Records that the worker has these units in their state after `step`, and all exponents after it."""
        self.units, self.loaded, self._since = set(units), None, step
        self.weights = step if self.units.issuperset(self.all) else step - 1

    def join(self, committed: int) -> None:
        """Called at the worker's first generation. Drops the worker's state unless it is the one after step
        `committed`."""
        if self._since != committed:
            self.units, self.loaded, self.weights = set(), None, NOTHING

    def adopt(self, shares: Shares) -> None:
        self.shares = shares
        self.mine = [unit for unit, holders in shares.holders.items() if self.me in holders]

    def informed(self, committed: int) -> None:
        """Records that the worker has the exponents after step `committed`. Call this before `took`, because every
        holder must have the exponents."""
        self.weights = max(self.weights, committed - 1)

    def took(self, unit: UnitId) -> None:
        """Records that the copy of a unit is complete."""
        self.units.add(unit)

    def settled(self) -> None:
        """Records that the worker holds all its units, and drops the rest of its initial state."""
        self.units |= set(self.mine)
        self.loaded = None

    def gathered(self, step: int) -> None:
        """Records that the worker has all weights after `step`, which is committed or was applied before its commit."""
        self.weights = step

    def taken_back(self, committed: int) -> None:
        """Records that all holders undo an uncommitted update. Weights that this worker has received since then no
        longer count."""
        self.weights = min(self.weights, committed - 1)

    def distrust(self, committed: int) -> None:
        """Records that received weights may be wrong, so the worker needs all weights again. Drops all units outside
        `mine`, because their weights were received too."""
        self.weights = min(self.weights, committed - 1)
        if self.shares is not None:
            self.units.intersection_update(self.mine)

    def commit(self, step: int, savers: Collection[Member]) -> None:
        """Records that a step is committed. Now the worker holds only the units in `mine`; others are out of date.

        savers: members of all stages that save a checkpoint of that step; may be empty"""
        assert self.shares is not None
        self.units, self.loaded = set(self.mine), None
        if savers:
            first = {unit: next((p for p in of if p in savers), None) for unit, of in self.shares.holders.items()}
            self.saves[step] = [unit for unit, saver in first.items() if saver == self.me]
