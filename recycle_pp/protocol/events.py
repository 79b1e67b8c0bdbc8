"""Events, the only inputs of a job. `Job.handle` takes one event and returns its `Outcome`.

    outcome = job.handle(WorkerDied(member))
    for to, message in outcome.sends: ...       # send these
    for note in outcome.notes: ...              # what happened, and why
    if outcome.expiry: ...                      # pass it to the job after control.suspicion seconds

The same events in the same order lead to the same decisions, so a list of events is a complete record of a job. Events
contain no plans, because the planner is a pure function of the problem.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
from recycle_schedules import Problem

from recycle_pp.wire.messages.ctl import Value
from recycle_pp.wire.messages.generations import Report
from recycle_pp.wire.messages.islands import CutMissing, OuterState, RoundReady
from recycle_pp.wire.messages.lifecycle import NoRoom, Prepared, StreamLost, Synced
from recycle_pp.wire.messages.members import Member
from recycle_pp.wire.messages.saving import Finished
from recycle_pp.wire.messages.steps import Evaluated, Vote
from recycle_pp.wire.messages.table import Message
from recycle_pp.wire.messages.units import Layout

from .takeover import Found

Json = dict[str, Any]
FromWorker = Report | Vote | Evaluated | Finished | Synced | StreamLost | Prepared | NoRoom | RoundReady | CutMissing
"""Messages from workers that a job handles."""


class Event(msgspec.Struct, frozen=True, tag=True):
    """An input of a job."""


class WorkerDescribed(Event, frozen=True):
    """A worker has built its stage.

    host:  the machine that the worker runs on
    units: layer of its stage -> (name, number of elements) of each unit of the layer
    outer: for an island, its position in the rounds at this start; else None
    """

    member: Member
    host: str
    units: dict[int, list[tuple[str, int]]]
    outer: OuterState | None = None


class WorkerReady(Event, frozen=True):
    """A worker has started. If the first generation has already begun, the worker becomes a joiner, which copies its
    units from peers before it takes part.

    earliest: first step that a joiner may take part in
    """

    member: Member
    earliest: int = 0


class WorkerDied(Event, frozen=True):
    member: Member


class MessageReceived(Event, frozen=True):
    """A live worker sent a message."""

    member: Member
    message: FromWorker


class WorkerEvicted(Event, frozen=True):
    """The worker's machine is about to be reclaimed. The worker leaves at the next commit, if a peer and a copy of each
    of its units remain."""

    member: Member


class WorkerReturned(Event, frozen=True):
    """A member has reconnected to the coordinator. Messages in both directions may have been lost.

    committed: newest step whose commit the worker has received
    """

    member: Member
    committed: int


class CoordinatorReplaced(Event, frozen=True):
    """A new coordinator continues the job of a lost one."""

    found: Found


class Restarted(Event, frozen=True):
    """A stage is lost, so all members restart from a checkpoint, some of them as workers of other stages.

    step:    number of committed steps in the checkpoint
    present: live members, at least as many as there are stages
    """

    step: int
    present: list[Member]


class LinksBroken(Event, frozen=True):
    """A connection between two live members broke. All links are rebuilt."""


class ProblemChanged(Event, frozen=True):
    """The planning problem has new durations or limits, for instance after profiling, or because a worker became slow.
    The new plan takes effect at the first commit after it is made."""

    problem: Problem


class MoveWanted(Event, frozen=True):
    """Layers should move to other stages while the job trains. Replaces the unfinished move, if there is one. If the
    job already has this layout, only cancels the unfinished move.

    layout:  the layers of every stage after the move
    problem: the problem without deaths, with the durations and limits of the stages in that layout
    """

    layout: Layout
    problem: Problem


class PlanMade(Event, frozen=True):
    """`Job.steady.plan` has planned the steps of this problem. The job's problem may have changed since."""

    problem: Problem


class SavingChanged(Event, frozen=True):
    """The conditions for saving a checkpoint have changed.

    occupied: a checkpoint is being written, so only the run's last checkpoint may start
    due: the next commit must save a checkpoint
    kept: stages whose part of the run's last checkpoint would survive the death of all their workers
    in_use: steps of the checkpoints that are being written or uploaded; None: unknown
    """

    occupied: bool
    due: bool
    kept: list[int] = []
    in_use: list[int] | None = None


class SettingsChanged(Event, frozen=True):
    """A user has changed settings of the running job. All later commits carry all changed settings, so a new
    coordinator receives them from the workers.

    values: key -> new value
    """

    values: dict[str, Value]


class EndRequested(Event, frozen=True):
    """Ends the job at the next commit, with a checkpoint. The members then wait, and the phase of the job is `ended`.
    Has no effect while the run's last step is in progress."""


class HoldExpired(Event, frozen=True):
    """The job has waited too long for a follower (a process that copies state from a donor) that lacks the newest step.
    The donor or the network may have failed.

    generation: the generation in which the wait began
    step: the step whose commit waits for an understudy; None if all workers wait for joiners or receivers
    """

    generation: int
    step: int | None = None


class Send(NamedTuple):
    to: Member
    message: Message


@dataclass(frozen=True)
class Outcome:
    """The results of one event.

    sends: messages, in order
    notes: dicts for the caller to act on or to record; the key "event" contains the note's name. They contain no sets,
        because the order of a set differs between processes
    expiry: an event to pass to the job after control.suspicion seconds, or None
    """

    sends: list[Send]
    notes: list[Json]
    expiry: HoldExpired | None = None
