"""What one worker has of its stage's optimizer state, where no worker has all of it: what it says of its blocks.

holdings = Holdings(me=1, sizes=[...], loaded=-1)     # `participant.holdings`
holdings.reported()                                   # its part of a report
holdings.adopt(shares)                                # who holds what from now on, as the coordinator says
holdings.took(block); holdings.settled()              # copies are here; all of them
holdings.commit()                                     # a step is agreed
"""

from __future__ import annotations

from dataclasses import dataclass, field

from recycle_pp.wire.messages.workers import Holds, Shares

NOTHING = -9  # as a step: none that could be agreed on


@dataclass
class Holdings:
    """What one worker has of its stage's state. Pure; guarded as its Participant is.

    me       its pipeline
    sizes    elements of every block of the stage
    loaded   the step after which it has the whole state, with which it began; None: no more
    weights  the newest step of which it has all weights; one less if it has all but these
    blocks   that it holds as they are after the newest committed step
    shares   what the present generation has given it, None before the first
    """

    me: int
    sizes: list[int]
    loaded: int | None
    weights: int = NOTHING
    blocks: set[int] = field(default_factory=set)
    shares: Shares | None = None

    def __post_init__(self) -> None:
        self.weights = NOTHING if self.loaded is None else self.loaded

    def reported(self) -> Holds:
        return Holds(self.sizes, sorted(self.blocks), self.loaded, self.weights)

    @property
    def mine(self) -> list[int]:
        """The blocks that this worker has to hold, in order."""
        assert self.shares is not None
        return [block for block, holders in enumerate(self.shares.holders) if self.me in holders]

    def join(self, committed: int) -> None:
        """Its first generation: what it began with is of use only if no step has been agreed since."""
        if self.loaded != committed:
            self.loaded, self.weights = None, NOTHING

    def adopt(self, shares: Shares) -> None:
        self.shares = shares

    def informed(self, committed: int) -> None:
        """It has the exponents after the newest step. Before the first copy: whoever holds a block has them."""
        self.weights = max(self.weights, committed - 1)

    def took(self, block: int) -> None:
        """A copy is complete here."""
        self.blocks.add(block)

    def settled(self) -> None:
        """It holds all that it has to, and gives up the rest of what it began with."""
        self.blocks |= set(self.mine)
        self.loaded = None

    def gathered(self, step: int) -> None:
        """It has all weights after that step, which is the newest, or one that was applied before it is agreed."""
        self.weights = step

    def taken_back(self, committed: int) -> None:
        """An update is undone, on all who hold its blocks: of the others it has whatever weights had come."""
        self.weights = min(self.weights, committed - 1)

    def distrust(self, committed: int) -> None:
        """Weights that it was sent may be wrong: it needs them all once more."""
        self.weights = min(self.weights, committed - 1)

    def commit(self) -> None:
        """A step is agreed, hence all hold what they have to; what is held beyond that is out of date from here on."""
        self.blocks, self.loaded = set(self.mine), None
