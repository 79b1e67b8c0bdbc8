"""Decoder layers that move between stages while the job trains."""

from __future__ import annotations

from collections.abc import Sequence

from recycle_pp.config.sizes import format_size
from recycle_pp.telemetry.words import plural
from recycle_pp.wire.records import Count, Seconds

from .event import Event


class Rebalancing(Event):
    """Layers begin to move to other stages, while the job trains. `before` and `layout`: decoder layers of each stage,
    now and after the move. `step_seconds` and `new_step_seconds`: planned, in the two layouts. `gain_seconds` of the
    new steps during the next `outage_seconds`, the expected time until the membership changes, against `cost_seconds`.
    `bytes` of state that `receivers`, workers, get."""

    before: list[int]
    layout: list[int]
    step_seconds: Seconds
    new_step_seconds: Seconds
    outage_seconds: Seconds
    gain_seconds: float
    cost_seconds: Seconds
    bytes: Count
    receivers: list[str]

    def text(self) -> str:
        return (
            f"layers move, {in_words(self.before)} -> {in_words(self.layout)} by stage: planned steps of "
            f"{self.step_seconds:.3g} s become {self.new_step_seconds:.3g} s, which gains {self.gain_seconds:.3g} s in "
            f"{self.outage_seconds:.0f} s and costs {self.cost_seconds:.2g} s; {format_size(self.bytes)} for "
            f"{plural(len(self.receivers), 'worker')}"
        )


class Rebalanced(Event):
    """Layers have moved, and steps from `first_step` on use the new layout. `before`, `layout`, `step_seconds`,
    `new_step_seconds`, `gain_seconds`, `cost_seconds`, `bytes`: as for `rebalancing`. `seconds` since then.
    `stall_seconds`: from the commit before the switch to the last worker's next op, without its optimizer step."""

    exported = True
    before: list[int]
    layout: list[int]
    first_step: Count
    step_seconds: Seconds
    new_step_seconds: Seconds
    gain_seconds: float
    cost_seconds: Seconds
    bytes: Count
    seconds: Seconds
    stall_seconds: Seconds

    def text(self) -> str:
        return (
            f"layers have moved, {in_words(self.before)} -> {in_words(self.layout)} by stage, after "
            f"{self.seconds:.2g} s and with a stall of {1000 * self.stall_seconds:.0f} ms; planned steps take "
            f"{self.new_step_seconds:.3g} s instead of {self.step_seconds:.3g} s"
        )


class RebalancingAbandoned(Event):
    """A move of layers has ended without a switch, and the job keeps its `layout`. `detail`: why."""

    layout: list[int]
    detail: str

    def text(self) -> str:
        return f"layers stay where they are, {in_words(self.layout)} by stage: {self.detail}"


def in_words(layout: Sequence[int], most: int = 16) -> str:
    """The number of layers of each stage: "9 9 6 8"."""
    more = f" and {len(layout) - most} more stages" if len(layout) > most else ""
    return " ".join(map(str, layout[:most])) + more
