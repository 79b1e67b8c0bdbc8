"""Decoder layers that move between stages while the job trains."""

from __future__ import annotations

from collections.abc import Sequence

from recycle_pp.config.sizes import format_size
from recycle_pp.telemetry.words import names, plural
from recycle_pp.wire.records import Count, Seconds

from .event import Event


class Rebalancing(Event):
    """Layers begin to move to other stages, while the job trains. `before` and `layout`: numbers of decoder layers of
    the stages, now and after the move. `step_seconds` and `new_step_seconds`: planned duration of a step in each
    layout. `outage_seconds`: expected time until the membership changes. `gain_seconds`: time that the new layout saves
    until then. `cost_seconds`: time that the move costs. `bytes`: size of the state that is sent. `receivers`: the
    workers that receive it."""

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
            f"layers move, {in_words(self.before)} -> {in_words(self.layout)} by stage: planned steps take "
            f"{self.new_step_seconds:.3g} s instead of {self.step_seconds:.3g} s, which saves "
            f"{self.gain_seconds:.3g} s in {self.outage_seconds:.0f} s and costs {self.cost_seconds:.2g} s; "
            f"{format_size(self.bytes)} for {plural(len(self.receivers), 'worker')}"
        )


class Rebalanced(Event):
    """Layers have moved, and steps from `first_step` on use the new layout. `before`, `layout`, `step_seconds`,
    `new_step_seconds`, `gain_seconds`, `cost_seconds`, `bytes`: as for `rebalancing`. `seconds`: from the beginning of
    the move to the switch. `stall_seconds`: from the commit before the switch until the last worker is ready for its
    next op, not counting the optimizer steps, for which it waits in every step."""

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
    return names(layout, most, " ") + (" stages" if len(layout) > most else "")
