"""Repeats the decisions of a run's coordinator, and prints each event with its consequences.

python -m recycle_pp.replay runs/mine               # without an argument: the newest run under runs/
python -m recycle_pp.replay --step 20 runs/mine     # only the events of one step
python -m recycle_pp.replay --all runs/mine         # also events without consequences, such as all votes but the last
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import datetime
from itertools import groupby
from typing import Any

from msgspec import structs

from recycle_pp.command import exit_code
from recycle_pp.protocol.events import Event, MessageReceived, Outcome
from recycle_pp.telemetry.replay import Decision, Replay
from recycle_pp.telemetry.run_folder import newest_run
from recycle_pp.telemetry.stored_run import local
from recycle_pp.telemetry.words import names, plural
from recycle_pp.wire.messages.members import Assignment, Member
from recycle_pp.wire.messages.steps import Commit
from recycle_pp.wire.messages.table import kind

DIFFERS = """
recycle_pp: the recorded decision differs. Either a different version of recycle_pp made it, or it contains a plan from
the first seconds of a job, when the planner was not compiled yet."""


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code: 0; 1 if a decision differs from the recorded one; 2 after printing a sentence about an
    error."""
    return exit_code(lambda: _run(arguments), "recycle_pp")


def _run(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("python -m recycle_pp.replay", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", nargs="?", help="folder of the run (default: the newest under runs/)")
    parser.add_argument("--step", type=int, help="print the events of this step only")
    parser.add_argument("--all", action="store_true", help="also print events without consequences")
    given = parser.parse_args(arguments)
    run = newest_run(given.run and local(given.run))
    run.require()
    events, steps = 0, set[int]()
    decisions = Replay(run.protocol)
    try:
        for decision in decisions:
            events += 1
            steps.add(decision.step)
            if not decision.same:
                print("\n".join(_lines(decision)))
                print(DIFFERS)
                return 1
            follows = decision.outcome.sends or decision.outcome.notes
            if given.step in (None, decision.step) and (follows or given.all):
                print("\n".join(_lines(decision)))
    except FileNotFoundError:
        raise ValueError(f"{run.path} has no {run.protocol.name}: no coordinator has run there") from None
    count = plural(decisions.left_out, "line")
    left_out = f"{count} skipped: damaged, or after a damaged line and before the next snapshot"
    if decisions.left_out and not events:
        raise ValueError(f"{run.protocol}: no event can be repeated; {left_out}")
    if given.step is not None and not (steps and min(steps) <= given.step <= max(steps)):
        known = f"steps {min(steps)} to {max(steps)}" if steps else "no events"
        raise ValueError(f"--step {given.step}: {run.protocol} has {known}")
    said = f"{plural(events, 'event')} repeated, and every decision is the same"
    print(f"{said}; {left_out}" if decisions.left_out else said)
    return 0


def _lines(decision: Decision) -> list[str]:
    at = datetime.fromtimestamp(decision.time).isoformat(" ", "milliseconds")
    what = _in_words(decision.event, decision.workers)
    first = f"{at}  step {decision.step}, generation {decision.generation}: {what}"
    return [first, *(f"    {line}" for line in _consequences(decision.outcome, decision.workers))]


def _in_words(event: Event, workers: Assignment) -> str:
    if isinstance(event, MessageReceived):
        return f"{kind(event.message)} from {_name(event.member, workers)}"
    fields = [
        f"worker {_name(value, workers)}" if name == "member" else f"{name} {_short(value)}"
        for name, value in structs.asdict(event).items()
    ]
    return ", ".join([kind(event).replace("_", " "), *fields])


def _name(member: Member, workers: Assignment) -> str:
    return str(workers[member]) if member in workers else f"the unknown member {member}"


def _consequences(outcome: Outcome, workers: Assignment) -> list[str]:
    """A line for each note, then one for each group of consecutive messages of the same kind, with their receivers."""
    notes = [note for note in outcome.notes if note["event"] != "committed"]  # a Commit message shows the commit
    found = [
        ", ".join([note["event"], *(f"{k} {_short(v)}" for k, v in note.items() if k != "event")]) for note in notes
    ]
    for _, run in groupby(outcome.sends, lambda send: type(send.message)):
        sends = list(run)
        message = sends[0].message
        what = f"commit of step {message.step}" if isinstance(message, Commit) else kind(message)
        found.append(f"{what} to {_short([_name(send.to, workers) for send in sends])}")
    return found


def _short(value: Any) -> str:
    """The value as text, shortened to 60 characters, or to 8 items of a collection."""
    if isinstance(value, list | set | frozenset | tuple) and not hasattr(value, "_fields"):
        items = value if isinstance(value, list | tuple) else sorted(map(str, value))
        return names(items, 8, " ")
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
