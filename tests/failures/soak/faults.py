"""The faults of a soak: a table of kinds, and a list drawn by a seed.

    for fault in draw(random.Random("7.0"), list(KINDS), mean=5.0, longest=60.0):
        fault.pause                     # seconds after the fault before it
        print(fault)                    # cut link, places 1 and 2, 12.4 s

A job has three places, one for each pipeline. A machine stands in each of them; a machine that is lost is replaced.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

PLACES, STAGES = 3, 2


@dataclass(frozen=True)
class Kind:
    """share: relative frequency. seconds: shortest and longest duration; (0, 0) is an instant.

    needs: what must be intact before it: "nodes" (all three, because it may cost one), "peer" (a worker of the same
    stage at another intact place), or "nothing".
    """

    share: int
    needs: str
    seconds: tuple[float, float] = (0.0, 0.0)


KINDS = {
    "kill worker": Kind(6, "peer"),
    "stop worker": Kind(2, "peer", (2.0, 30.0)),
    "kill supervisor": Kind(2, "nodes"),
    "kill agent": Kind(1, "nodes"),
    "kill node": Kind(2, "nodes"),
    "drain node": Kind(1, "nodes"),
    "stop supervisor": Kind(2, "nodes", (5.0, 30.0)),
    "stop coordinator": Kind(3, "nodes", (5.0, 30.0)),
    "stop agent": Kind(1, "nothing", (30.0, 300.0)),
    "stop node": Kind(1, "nodes", (5.0, 30.0)),
    "cut node": Kind(3, "nodes", (1.0, 60.0)),
    "deafen node": Kind(2, "nodes", (1.0, 60.0)),
    "mute node": Kind(2, "nodes", (1.0, 60.0)),
    "cut link": Kind(3, "nodes", (1.0, 60.0)),
    "cut link one way": Kind(3, "nodes", (1.0, 60.0)),
    "reset node": Kind(2, "nodes", (0.1, 0.6)),
    "reset link": Kind(2, "nodes", (0.1, 0.6)),
    "storm": Kind(2, "nothing", (5.0, 30.0)),
    "freeze disk": Kind(3, "nothing", (2.0, 30.0)),
}
AT_ONCE = 0.25  # share of the faults that follow within a second, so that they meet the recovery from the one before


@dataclass(frozen=True)
class Fault:
    """place, other: two different places, from 0. stage: of the worker or supervisor that is struck."""

    kind: str
    pause: float
    seconds: float
    place: int
    other: int
    stage: int

    def __str__(self) -> str:
        what = self.kind
        if "worker" in what:
            what += f" {self.place}.{self.stage}"
        elif "link" in what:
            what += f", places {self.place} and {self.other}"
        elif what not in ("storm", "freeze disk", "stop coordinator"):
            what += f", place {self.place}"
        return what + (f", {self.seconds:.1f} s" if self.seconds else "")


def draw(chance: random.Random, kinds: Sequence[str], mean: float, longest: float) -> Iterator[Fault]:
    """Endless. mean: seconds between two faults that do not follow at once; longest: seconds that one lasts."""
    while True:
        kind = chance.choices(kinds, [KINDS[kind].share for kind in kinds])[0]
        place, other = chance.sample(range(PLACES), 2)
        low, high = KINDS[kind].seconds
        at_once = chance.random() < AT_ONCE
        pause = chance.uniform(0, 1) if at_once else chance.expovariate(1 / mean)
        seconds = (
            min(longest, low * (high / low) ** chance.random()) if low else 0.0
        )  # short ones as often as long ones
        yield Fault(kind, pause, seconds, place, other, chance.randrange(STAGES))
