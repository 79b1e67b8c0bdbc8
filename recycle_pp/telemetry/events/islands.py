"""Rounds of islands, and their store."""

from __future__ import annotations

from recycle_pp.telemetry.words import plural
from recycle_pp.wire.records import Count, Number, Seconds

from .event import Event


class RoundApplied(Event):
    """This island has applied the result of a round. `round`: its number. `islands`: the islands in it. `samples`:
    number of samples in the round. `norm`: norm of the mean of their deltas. `cosine`: mean cosine between the deltas
    of two islands, or null for a single island. `late`: whether this island sent a delta that is not in the round.
    `steps`: steps of this island since the previous round. `lag_steps`: steps from the delta of this island to the use
    of the result, or null without a delta. `sent_bytes`, `received_bytes`: traffic with the store since the previous
    event of this kind. `dollars`: price of `sent_bytes`, or null without islands.egress_per_gb. `damaged`: objects that
    were not used, and why."""

    exported = True
    round: Count
    islands: list[str]
    samples: Count
    norm: Number
    cosine: Number | None
    late: bool
    steps: Count
    lag_steps: Count | None
    sent_bytes: Count
    received_bytes: Count
    dollars: Number | None
    damaged: list[str]

    def text(self) -> str:
        of = ", ".join(self.islands) or "no island"
        cosine = "" if self.cosine is None else f", cosine {self.cosine:.2f}"
        late = "; the delta of this island was late and is not in it" if self.late else ""
        refused = "".join(f"; not used: {why}" for why in self.damaged[:2])
        return f"round {self.round} of {of} applied: norm {self.norm:.3g}{cosine}{late}{refused}"


class RoundClosed(Event):
    """The set of islands in a round is final. `round`: its number. `islands`: their names. `samples`: number of samples
    in their deltas. This island uses the result later (`round_applied`)."""

    printed = False
    round: Count
    islands: list[str]
    samples: Count

    def text(self) -> str:
        return f"round {self.round} is closed, with {', '.join(self.islands) or 'no island'}"


class RoundAwaited(Event):
    """The island has made islands.max_local steps without the result of a round, and waits for it. `round`: its
    number. `steps`: number of these steps."""

    round: Count
    steps: Count

    def text(self) -> str:
        return f"the island waits for round {self.round}, after {plural(self.steps, 'step')} of its own"


class IslandJoined(Event):
    """Another island takes part in the rounds, or already did when this coordinator started. `island`: its name."""

    exported = True
    island: str

    def text(self) -> str:
        return f"island {self.island} takes part in the rounds"


class IslandLeft(Event):
    """Another island no longer takes part in the rounds. `island`: its name. `ended`: whether its job has reported its
    end. If not, its lease in the store was not renewed for two minutes."""

    exported = True
    island: str
    ended: bool

    def text(self) -> str:
        why = "its job has ended" if self.ended else "its lease in the store was not renewed"
        return f"island {self.island} has left the rounds: {why}"


class IslandLate(Event):
    """A round was closed without the delta of a live island. `island`: its name; it may be this island. `round`: number
    of the round."""

    exported = True
    island: str
    round: Count

    def text(self) -> str:
        return f"island {self.island} is late: round {self.round} was closed without its delta"


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
