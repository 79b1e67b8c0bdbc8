"""The faults of a soak: a table of kinds, and random sequences of faults.

    for fault in draw(random.Random("7.0"), list(KINDS), mean=5.0, longest=60.0, stages=2):
        fault.pause                     # seconds after the previous fault
        print(fault)                    # "cut link, places 1 and 2, 12.4 s"

A job has three places, one per pipeline. Each place has a machine, which is replaced when it is lost.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

PLACES = 3


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    share    relative frequency
    needs    what must be intact before the fault:
             "nodes"    all three, because the fault may cost one
             "peer"     a worker of the same stage at another place; with sharded state at all places, because only two
                        workers keep a copy of each unit
             "nothing"
    seconds  shortest and longest duration; (0, 0): instantaneous
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
AT_ONCE = 0.25  # share of faults that come within a second of the previous one, to hit its recovery


@dataclass(frozen=True)
class Fault:
    """One fault. place, other: two different places, from 0. stage: that of the affected worker or supervisor."""

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


def draw(chance: random.Random, kinds: Sequence[str], mean: float, longest: float, stages: int) -> Iterator[Fault]:
    """An endless sequence of faults.

    mean     average pause, seconds
    longest  maximum duration of a fault, seconds
    stages   number of stages of the job
    """
    while True:
        kind = chance.choices(kinds, [KINDS[kind].share for kind in kinds])[0]
        place, other = chance.sample(range(PLACES), 2)
        low, high = KINDS[kind].seconds
        at_once = chance.random() < AT_ONCE
        pause = chance.uniform(0, 1) if at_once else chance.expovariate(1 / mean)
        seconds = min(longest, low * (high / low) ** chance.random()) if low else 0.0  # logarithmically uniform
        yield Fault(kind, pause, seconds, place, other, chance.randrange(stages))
