"""Repeats the decisions of a run's coordinators from its protocol.jsonl.

    decisions = Replay(run.protocol)
    for decision in decisions:
        decision.event, decision.outcome, decision.same
    decisions.left_out

Restores a job from the snapshot before an event, passes the event to this job, and compares the outcome with the
recorded one. So the file proves each decision and its reason, and a debugger can reproduce a fault of the protocol.

An outcome with a plan differs from the recorded one if the coordinator made the plan before its planner was compiled.
This happens in the first half minute on a new machine, or in the first seconds on a busy one.
"""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
from recycle_schedules import actions, plan
from recycle_schedules.compiled import load

from recycle_pp.protocol.event_json import decode, fingerprint
from recycle_pp.protocol.events import Event, Outcome
from recycle_pp.protocol.job import Job
from recycle_pp.protocol.snapshot import restored
from recycle_pp.wire.files import open_regular
from recycle_pp.wire.messages.members import Assignment
from recycle_pp.wire.records import ProtocolLine
from recycle_pp.wire.terms import Terms


@dataclass(frozen=True)
class Decision:
    """A repeated decision of a coordinator.

    time     when the event was handled, seconds since 1970
    step     the first step that was not committed when the event arrived
    workers  member (a process) -> its worker (a pipeline and a stage)
    same     whether the outcome has the recorded fingerprint
    """

    time: float
    step: int
    generation: int
    event: Event
    outcome: Outcome
    workers: Assignment
    same: bool


class Replay:
    """The decisions in this protocol.jsonl, oldest first. Lines that a replaced coordinator wrote are skipped.

    left_out  number of lines so far that cannot be repeated: each damaged line, and all lines from there to the next
              snapshot. An unfinished last line does not count

    Iterating raises:
        FileNotFoundError, UnreadableFile: there is no such file, or it cannot be read.
        NotASnapshot: a different version of recycle_pp wrote it.
        ValueError: an event does not fit the job.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.left_out = 0

    def __iter__(self) -> Iterator[Decision]:
        load()  # waits for the planner's compiled loops; uncompiled loops give different plans
        job: Job | None = None
        terms = Terms()
        with open_regular(self._path) as file:
            for number, text in enumerate(file, 1):
                line = _parsed(text)
                if line is None:
                    job = None  # the lines up to the next snapshot cannot be repeated without this one
                elif not terms.counts(line.term):
                    continue
                elif line.snapshot is not None:
                    job = restored(b64decode(line.snapshot), plan, actions)
                    continue
                if line is None or job is None:
                    self.left_out += text.endswith(b"\n")
                    continue
                event, step = decode(line.event), job.committed + 1
                try:
                    outcome = job.handle(event)
                except KeyError as error:  # such as the number of a member in a line that was changed by hand
                    raise ValueError(
                        f"{self._path}, line {number}: this event names {error}, which the job does not have"
                    ) from error
                same = fingerprint(outcome) == line.outcome
                yield Decision(line.time, step, job.generation, event, outcome, job.assignment, same)


def _parsed(text: bytes) -> ProtocolLine | None:
    """The record of a line. None if the line is damaged, because its writer was killed or the disk was full."""
    try:
        return msgspec.convert(json.loads(text), ProtocolLine)
    except (ValueError, RecursionError):
        return None
