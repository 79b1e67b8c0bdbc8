"""Everything a job depends on, as values: `Job.handle` takes one event and returns its `Outcome`.

    outcome = job.handle(WorkerDied(worker))
    for to, message in outcome.sends: ...       # deliver
    for note in outcome.notes: ...              # what happened, and why
    if outcome.expiry: ...                      # hand it back to the job after control.suspicion seconds

The same events in the same order lead to the same job, so a list of them is a complete record of its decisions. A plan
is not part of its event: the planner is a pure function of the problem.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
from recycle_schedules import Problem, Worker

from recycle_pp.wire.messages.table import Message

from .takeover import Found

Json = dict[str, Any]


class Event(msgspec.Struct, frozen=True):
    """One fact that a job reacts to."""


class WorkerDescribed(Event, frozen=True):
    """A worker has built its stage.

    host:  the machine it runs on
    units: names of the units of its stage's state
    """

    worker: Worker
    host: str
    units: list[str]


class WorkerReady(Event, frozen=True):
    """A worker can take part: from the first generation, or, later, once it has followed a peer's state.

    earliest: the first step that it may take part in
    """

    worker: Worker
    earliest: int = 0


class WorkerDied(Event, frozen=True):
    worker: Worker


class MessageReceived(Event, frozen=True):
    """A live worker sent a Report, Vote, Evaluated, Finished or Synced."""

    worker: Worker
    message: Message


class WorkerEvicted(Event, frozen=True):
    """The worker's machine will be taken away: the worker leaves with the next commit, if a peer stays."""

    worker: Worker


class WorkerReturned(Event, frozen=True):
    """A member's connection to the coordinator was reset and is open again. Messages in both directions may be lost.

    committed: the newest commit that the worker received
    """

    worker: Worker
    committed: int


class CoordinatorReplaced(Event, frozen=True):
    """This job continues one whose coordinator was lost."""

    found: Found


class LinksBroken(Event, frozen=True):
    """A connection between two live members broke: all links are built again."""


class ProblemChanged(Event, frozen=True):
    """Durations or limits changed (a profile, a slow worker). The first commit after the plan is made brings it."""

    problem: Problem


class PlanMade(Event, frozen=True):
    """`Job.steady.plan` has planned the steps of this problem, which may be out of date by now."""

    problem: Problem


class SavingChanged(Event, frozen=True):
    """occupied: a checkpoint is being written, so only the last one of the run may begin
    due:      the next commit brings a checkpoint
    """

    occupied: bool
    due: bool


class EndRequested(Event, frozen=True):
    """The next commit is the last one: it brings a checkpoint, its members wait, and the phase is `ended`. Nothing
    changes if the last step of the run is under way."""


class HoldExpired(Event, frozen=True):
    """The job has waited too long for a joiner to apply step `committed`: its donor or the network may be lost."""

    committed: int


class Send(NamedTuple):
    to: Worker
    message: Message


@dataclass(frozen=True)
class Outcome:
    """What follows from one event.

    sends:  in order
    notes:  what happened, each with its name under "event", for whoever acts on it or records it
    expiry: an event to hand back to the job after control.suspicion seconds, or None
    """

    sends: list[Send]
    notes: list[Json]
    expiry: HoldExpired | None = None
