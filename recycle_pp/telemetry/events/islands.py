"""Rounds of islands, and the store in which they meet."""

from __future__ import annotations

from recycle_pp.telemetry.words import plural
from recycle_pp.wire.records import Count, Number, Seconds

from .event import Event


class RoundApplied(Event):
    """This island has taken the result of a round. `round`: its number. `islands`: the islands in it. `samples`: number
    of samples in the round. `norm`: norm of the mean of their deltas. `cosine`: mean cosine between the deltas of two
    islands, or null for a single island. `late`: whether this island had sent a delta that is not in the round.
    `steps`: steps of this island since the previous round. `sent_bytes`, `received_bytes`: traffic with the store since
    this coordinator began. `dollars`: price of `sent_bytes`. `damaged`: objects that were not used, and why."""

    exported = True
    round: Count
    islands: list[str]
    samples: Count
    norm: Number
    cosine: Number | None
    late: bool
    steps: Count
    sent_bytes: Count
    received_bytes: Count
    dollars: Number
    damaged: list[str]

    def text(self) -> str:
        of = ", ".join(self.islands) or "no island"
        cosine = "" if self.cosine is None else f", cosine {self.cosine:.2f}"
        late = "; the delta of this island was late and is not in it" if self.late else ""
        refused = "".join(f"; not used: {why}" for why in self.damaged[:2])
        return f"round {self.round} of {of} applied: norm {self.norm:.3g}{cosine}{late}{refused}"


class RoundAwaited(Event):
    """The island has made islands.max_local steps without the result of a round, and waits for it. `round`: its
    number. `steps`: number of these steps."""

    round: Count
    steps: Count

    def text(self) -> str:
        return f"the island waits for round {self.round}, after {plural(self.steps, 'step')} of its own"


class IslandsCutOff(Event):
    """The store of the islands does not answer, and training continues. `detail`: the latest error. `seconds`: time
    since its last answer."""

    detail: str
    seconds: Seconds

    def text(self) -> str:
        return f"no answer from the store of the islands for {self.seconds:.0f} s: {self.detail}; training continues"


class IslandsInTouch(Event):
    """The store of the islands answers again."""

    def text(self) -> str:
        return "the store of the islands answers again"
