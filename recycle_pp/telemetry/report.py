"""A run in a few lines: its deaths, their causes and costs, and the loss around them.

    print(report(RunFolder("runs/mine")))      # python -m recycle_pp.report runs/mine

It is read from metrics.jsonl, events.jsonl and summary.json.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from recycle_pp.wire.files import decode, read
from recycle_pp.wire.records import Summary

from .events.catalog import parsed
from .events.deaths import DeathDetected, explained
from .events.event import Event
from .events.recovery import Resumed
from .events.workers import Rejoined
from .run_folder import RunFolder
from .words import plural

Record = dict[str, Any]


def report(run: RunFolder) -> str:
    """The report as text of several lines; ValueError if the folder holds no run, or if a file is damaged."""
    run.require()
    metrics, events, steps = run.lines(run.metrics), explained(parsed(run.lines(run.events))), run.steps()
    lines = [f"Run {run.path}", _course(metrics)]
    for event in events:
        if isinstance(event, DeathDetected | Rejoined):
            lines.append(f"  {event.sentence(steps)}{_loss_around(event.step, metrics)}")
        if isinstance(event, DeathDetected):
            lines.append(f"    {_cost(event, events, metrics)}")
    if not any(isinstance(event, DeathDetected) for event in events):
        lines.append("  no worker died")
    with suppress(FileNotFoundError):
        lines += _summary(decode(run.summary, read(run.summary), Summary))
    return "\n".join(lines)


def _course(metrics: Sequence[Record]) -> str:
    losses = [(m["step"], m["loss"]) for m in metrics if m.get("loss") is not None]
    if not losses:
        return "  no step is committed"
    text = f"  loss {losses[0][1]:.4f} in step {losses[0][0]}, {losses[-1][1]:.4f} in step {losses[-1][0]}"
    validated = [m for m in metrics if m.get("val_loss") is not None]
    return text + (f", {_validation(validated[-1])}" if validated else "")


def _validation(record: Record) -> str:
    samples = record.get("val_samples")  # missing in runs of earlier versions
    on = "held-out text" if samples is None else plural(samples, "held-out sample")
    return f"{record['val_loss']:.4f} on {on}"


def _cost(death: DeathDetected, events: Sequence[Event], metrics: Sequence[Record]) -> str:
    """The stall after a death, and the work that its peers repeated."""
    # A cause may be known only after the job has continued, so the recovery nearest in time is the one of this death.
    recoveries = [event for event in events if isinstance(event, Resumed) and death.worker in event.dead]
    if not recoveries:
        continued = any(record["step"] > death.step for record in metrics)
        return "no worker had to wait" if continued else "the job did not continue"
    nearest = min(recoveries, key=lambda event: abs(event.time - death.time))
    ops = f"{plural(nearest.lost_ops, 'op')} lost, {nearest.redone_ops} redone by peers"
    return f"stalled {1000 * nearest.stall_seconds:.0f} ms; {ops}"


def _loss_around(step: int, metrics: Sequence[Record]) -> str:
    losses = {m["step"]: m["loss"] for m in metrics if m.get("loss") is not None}
    near = [(s, losses[s]) for s in (step - 1, step, step + 1) if s in losses]
    return ": loss " + ", ".join(f"{loss:.4f} (step {s})" for s, loss in near) if near else ""


def _summary(summary: Mapping[str, Any]) -> list[str]:
    lines = []
    if (steps := summary.get("steps")) is not None:
        text = f"  {plural(steps, 'step')}, {summary.get('samples', 0):,} samples, {summary.get('tokens', 0):,} tokens"
        lines.append(f"{text}; {summary.get('wall_seconds', 0.0):.1f} s since the last start")
    if (share := summary.get("bubbles")) is not None:
        counts = f"{plural(summary.get('lost_ops', 0), 'op')} lost, {summary.get('redone_ops', 0)} redone"
        lines.append(f"  bubbles {share:.1%} (median of the steps); {counts}")
    if digest := summary.get("weights_sha256"):
        lines.append(f"  weights sha256 {digest}")
    return lines
