"""A run in a few lines: its deaths, their causes and costs, and the loss around them.

print(report(RunFolder("runs/mine")))      # python -m recycle_pp.report runs/mine
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from recycle_pp.config.sizes import format_size
from recycle_pp.wire.records import Step

from .events.checkpoints import folder
from .events.deaths import DeathDetected
from .events.event import Event
from .events.job import Started
from .events.layers import Rebalanced
from .events.recovery import Restored, Resumed
from .events.workers import Rejoined
from .island_figures import IslandRounds, in_words
from .run_folder import RunFolder
from .run_reader import RunReader
from .words import plural


def report(run: RunFolder) -> str:
    """The report as several lines of text. Raises ValueError if the folder contains no run, or if a file is damaged."""
    run.require()
    reader = RunReader(run)
    steps, events = reader.steps(), reader.events()
    total = run.steps()
    lines = [f"Run {run.path}", _course(steps)]
    losses = {line.step: line.loss for line in steps if line.loss is not None}
    recoveries = _recoveries(events)
    for number, event in enumerate(events):
        if isinstance(event, DeathDetected | Rejoined):
            lines.append(f"  {event.sentence(total)}{_loss_around(event.step, losses)}")
        if isinstance(event, DeathDetected):
            lines.append(f"    {_restart(event, events[number + 1 :], steps) or _cost(event, recoveries, steps)}")
        if isinstance(event, Rebalanced):
            lines += [f"  {event.sentence(total)}", f"    {_comparison(event)}"]
    if not any(isinstance(event, DeathDetected) for event in events):
        lines.append("  no worker died")
    lines += _rounds(run, events)
    if (summary := reader.summary()) is not None:
        lines += _summary(summary)
    return "\n".join(lines)


def _course(steps: Sequence[Step]) -> str:
    losses = [(line.step, line.loss) for line in steps if line.loss is not None]
    if not losses:
        return "  no step was committed"
    text = f"  loss {losses[0][1]:.4f} in step {losses[0][0]}, {losses[-1][1]:.4f} in step {losses[-1][0]}"
    validated = [line for line in steps if line.val_loss is not None]
    return text + (f", {_validation(validated[-1])}" if validated else "")


def _validation(line: Step) -> str:
    # runs of earlier versions lack the number of samples
    on = "held-out text" if line.val_samples is None else plural(line.val_samples, "held-out sample")
    return f"{line.val_loss:.4f} on {on}"


def _restart(death: DeathDetected, later: Sequence[Event], steps: Sequence[Step]) -> str:
    """The steps that were rolled back because a stage lost its last worker, in words; "" if the death caused no
    restart."""
    for number, event in enumerate(later):
        match event:
            case Started():
                return ""
            case Resumed(dead=dead) if death.worker in dead:
                return ""
            case Restored(checkpoint=checkpoint, undone_from=first, undone_to=last):
                committed = checkpoint - 1 if last is None else last
                if death.step < committed:  # peers had replaced the worker long before
                    return ""
                undone = "no step" if first is None or last is None else plural(last - first + 1, "step")
                numbers = f" ({first} to {last})" if first != last else ""
                until = _seconds_to_commit(death, later[number + 1 :], steps)
                return f"all workers restarted from {folder(checkpoint)}; {undone} rolled back{numbers}{until}"
    return ""


def _seconds_to_commit(death: DeathDetected, after: Sequence[Event], steps: Sequence[Step]) -> str:
    """The seconds from a death to the first commit after its restart, in words; "" if that commit was rolled back."""
    end = min((event.time for event in after if isinstance(event, Restored | Started)), default=math.inf)
    commits = [line.time for line in steps if line.time is not None and death.time < line.time < end]
    return f"; {min(commits) - death.time:.1f} s until the next commit" if commits else ""


def _recoveries(events: Sequence[Event]) -> dict[str, list[Resumed]]:
    """The recoveries from the deaths of each worker."""
    found = defaultdict[str, list[Resumed]](list)
    for event in events:
        if isinstance(event, Resumed):
            for worker in event.dead:
                found[worker].append(event)
    return found


def _cost(death: DeathDetected, recoveries: Mapping[str, Sequence[Resumed]], steps: Sequence[Step]) -> str:
    """The stall after a death, and the numbers of lost and redone ops, in words."""
    # If the worker died several times, the recovery nearest in time, before or after the event, is that of this death.
    own = recoveries.get(death.worker)
    if not own:
        continued = bool(steps) and steps[-1].step > death.step
        return "no worker had to wait" if continued else "the job did not continue"
    nearest = min(own, key=lambda event: abs(event.time - death.time))
    ops = f"{plural(nearest.lost_ops, 'op')} lost, {nearest.redone_ops} redone by peers"
    return f"stalled {1000 * nearest.stall_seconds:.0f} ms; {ops}"


def _comparison(move: Rebalanced) -> str:
    """The expected gain and cost of a move of layers, and the bytes sent, as text."""
    expected = f"expected to gain {move.gain_seconds:.3g} s and to cost {move.cost_seconds:.2g} s"
    return f"{expected}; {format_size(move.bytes)} sent"


def _rounds(run: RunFolder, events: Sequence[Event]) -> list[str]:
    """The figures of the rounds if the run is an island."""
    rounds = IslandRounds(run.read_settings().islands.name or "")
    for event in events:
        rounds.follow(event)
    figures = rounds.figures()
    return [] if figures is None else [f"  {line}" for line in in_words(figures)]


def _loss_around(step: int, losses: Mapping[int, float]) -> str:
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
