"""A run in a few lines: what died and why, what it cost, and that the loss went on.

    print(report(RunFolder("runs/mine")))      # python -m recycle_pp.report runs/mine

Everything is read from the run folder: metrics.jsonl, events.jsonl, summary.json.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from recycle_pp.wire.files import decode, read
from recycle_pp.wire.records import Summary

from .events import cause_in_words, explained, plural, when
from .run_folder import RunFolder

Record = dict[str, Any]


def report(run: RunFolder) -> str:
    """The report as text of several lines; ValueError if the folder holds no run, or a file of it is damaged."""
    run.require()
    metrics, events, steps = run.lines(run.metrics), explained(run.lines(run.events)), run.steps()
    lines = [f"Run {run.path}", _course(metrics)]
    for event in events:
        if event["event"] == "death_detected":
            lines += _death(event, events, metrics, steps)
        elif event["event"] == "rejoined":
            back = f"worker {event.get('worker')} is back{_loss_around(event['step'], metrics)}"
            lines.append(f"  {when(event['step'], steps)}: {back}")
    if not any(event["event"] == "death_detected" for event in events):
        lines.append("  nobody died")
    with suppress(FileNotFoundError):
        lines += _summary(decode(run.summary, read(run.summary), Summary))
    return "\n".join(lines)


def _course(metrics: Sequence[Record]) -> str:
    losses = [(m["step"], m["loss"]) for m in metrics if m.get("loss") is not None]
    if not losses:
        return "  no step is finished"
    text = f"  loss {losses[0][1]:.4f} in step {losses[0][0]}, {losses[-1][1]:.4f} in step {losses[-1][0]}"
    validated = [m for m in metrics if m.get("val_loss") is not None]
    return text + (f", {_validation(validated[-1])}" if validated else "")


def _validation(record: Record) -> str:
    samples = record.get("val_samples")  # absent in runs of earlier versions
    on = "held-out text" if samples is None else plural(samples, "held-out sample")
    return f"{record['val_loss']:.4f} on {on}"


def _death(death: Record, events: Sequence[Record], metrics: Sequence[Record], steps: int) -> list[str]:
    lines = [
        f"  {when(death['step'], steps)}: worker {death.get('worker')} died ({cause_in_words(death)})"
        + _loss_around(death["step"], metrics)
    ]
    # The recovery that names the worker, nearest in time: the cause of a death may be known only after the job went on.
    recoveries = [
        event for event in events if event["event"] == "resumed" and death.get("worker") in event.get("dead", ())
    ]
    if not recoveries:
        went_on = any(record["step"] > death["step"] for record in metrics)
        return [*lines, "    nobody had to wait" if went_on else "    the job did not go on after it"]
    resumed = min(recoveries, key=lambda event: abs(event.get("time", 0.0) - death.get("time", 0.0)))
    text = f"    stalled {1000 * resumed.get('stall_seconds', 0.0):.0f} ms"
    if resumed.get("lost_ops") is not None:
        text += f"; {plural(resumed['lost_ops'], 'op')} lost, {resumed.get('redone_ops', 0)} redone by peers"
    return [*lines, text]


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
