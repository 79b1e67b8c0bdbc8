"""Handles the requests of operators (`python -m recycle_pp.ctl`).

operators = Operators(state, driver, deaths)   # a handler of the job's events
await operators.serve(peer)                    # receives one request, carries it out, and sends the answers
operators.stacks(rank, message)                # the stacks that a request has asked for
operators.profiled(rank, message)              # the profile that a request has asked for

Most requests trigger something that also happens without an operator:

| request | same effect as |
|---|---|
| drain | SIGTERM to the worker |
| stop | SIGTERM to all nodes |
| checkpoint | the end of `checkpoint.minutes` |
| stacks | a hang of the worker, but the worker is not killed |

A request is carried out even if its operator disconnects. If the coordinator is lost, the connection ends without a
final answer. The operator then repeats the request to the next coordinator, so a request may arrive twice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from recycle_schedules import Worker

from recycle_pp.config.live import checked
from recycle_pp.config.setting import shown
from recycle_pp.protocol.events import Event, Outcome
from recycle_pp.protocol.events import SettingsChanged as Changed
from recycle_pp.telemetry.checkpoint_folders import name
from recycle_pp.telemetry.events.control import Profiled as ProfiledEvent
from recycle_pp.telemetry.events.control import SettingsChanged
from recycle_pp.telemetry.events.deaths import cause_in_words
from recycle_pp.telemetry.words import plural, when
from recycle_pp.wire.connection import Peer
from recycle_pp.wire.frames import ChannelClosed
from recycle_pp.wire.messages.ctl import (
    FROM_OPERATOR,
    Begun,
    ChangeSettings,
    Done,
    Drain,
    Ended,
    NotDone,
    ReadStacks,
    RecordProfile,
    Stop,
    TakeCheckpoint,
    Value,
)
from recycle_pp.wire.messages.lifecycle import Profile, Profiled
from recycle_pp.wire.messages.supervisors import Evict, ShowStacks, Stacks
from recycle_pp.wire.messages.table import Message

from .deaths import Deaths
from .driver import Driver
from .ranks import Rank
from .state import JobState

STOP_CODE = 143  # exit code of the job after `stop`, as after SIGTERM
STACKS_SECONDS = 5.0  # time for a supervisor to send its worker's stacks
_LOOK_SECONDS = 0.05  # between two checks for whether a request is done

Say = Callable[[str], None]
"""Sends the operator a line about the progress of its request."""


class NotPossible(Exception):
    """A request is refused or has failed. The message is one sentence."""


class Operators:
    def __init__(self, state: JobState, driver: Driver, deaths: Deaths) -> None:
        self._state = state
        self._driver = driver
        self._deaths = deaths
        self._stacks: dict[int, str] = {}  # rank -> newest stacks
        self._profiles: dict[int, Profiled] = {}  # rank -> newest answer to a request for a profile
        self._committed: dict[str, Value] = {}  # changed settings in the newest commit
        # Changed settings in the commit before the newest one, which all voters of the newest step have received.
        self._known: dict[str, Value] = {}
        self._asked: dict[str, Value] = {}  # the newest value that an operator has asked for
        self._verbs: dict[type[Message], Callable[[Any, Say], Awaitable[Message]]] = {
            Drain: self._drain,
            Stop: self._stop,
            TakeCheckpoint: self._checkpoint,
            ReadStacks: self._read_stacks,
            RecordProfile: self._profile,
            ChangeSettings: self._set,
        }

    async def serve(self, peer: Peer) -> None:
        try:
            request = await peer.recv(FROM_OPERATOR)
        except ChannelClosed:
            return
        await self._state.lease.wait()
        try:
            answer = await self._verbs[type(request)](request, lambda text: peer.send(Begun(text)))
        except NotPossible as reason:
            answer = NotDone(str(reason))
        await self._state.lease.wait()  # a replaced coordinator must not answer
        peer.send(answer)

    def handled(self, event: Event, outcome: Outcome) -> None:
        for note in outcome.notes:
            match note["event"]:
                case "committed":
                    self._known, self._committed = self._committed, note["commit"].changes
                case "settings_changed":  # by an operator, or found by a new coordinator
                    self._state.change(note["values"])
                    if isinstance(event, Changed):
                        self._state.recorder.event(SettingsChanged(changes=_words(note["values"])))

    def stacks(self, rank: Rank, message: Stacks) -> None:
        self._stacks[rank.number] = message.text

    def profiled(self, rank: Rank, message: Profiled) -> None:
        self._profiles[rank.number] = message
        if not message.failed:
            self._state.recorder.event(ProfiledEvent(worker=str(rank.role), path=message.path, steps=message.steps))

    # -- requests ----------------------------------------------------------------------------------------------

    async def _drain(self, request: Drain, say: Say) -> Message:
        left = Done(f"worker {Worker(*request.worker)} has left; the job continues without it")
        # If the coordinator is lost during a request, the operator repeats it; the worker may have left by then.
        if self._has_left(Worker(*request.worker)):
            return left
        job, rank = self._state.job, self._member(request.worker)
        worker, incarnation = rank.role, rank.incarnation
        staying = [of for member, of in job.workers.items() if member not in {rank.number, *job.leaving}]
        if any(of.stage == worker.stage for of in staying):
            say(f"worker {worker} finishes its step, hands over its work and leaves")
            rank.send(Evict())
        else:
            await self._drain_last(request, rank, say)
        await self._until(lambda: rank.incarnation != incarnation or rank.explained >= incarnation)
        death = rank.causes.get(incarnation)
        if rank.incarnation != incarnation:
            raise NotPossible(f"worker {worker} was restarted before it could leave")
        if death is None or death.cause != "eviction":
            why = "its node is lost" if death is None else cause_in_words(death)
            raise NotPossible(f"worker {worker} died before it could leave: {why}")
        return left

    async def _drain_last(self, request: Drain, rank: Rank, say: Say) -> None:
        """Ends the last worker of a stage after a checkpoint, from which all others restart."""
        stages, worker, live = self._state.settings.parallel.stages, rank.role, self._state.job.live
        if not request.force:
            raise NotPossible(
                f"worker {worker} is the last of stage {worker.stage}; with --force it leaves after a checkpoint, from "
                "which all others restart"
            )
        if len(live) <= stages:
            raise NotPossible(
                f"without worker {worker} only {plural(len(live) - 1, 'worker')} would be left for "
                f"{plural(stages, 'stage')}; `ctl stop` ends the job with a checkpoint"
            )
        incarnation = rank.incarnation
        await self._save(say)
        if rank.incarnation == incarnation and rank.alive:
            self._deaths.end(rank, "eviction", "ctl drain --force")

    async def _stop(self, request: Stop, say: Say) -> Message:
        state = self._state
        places = list(state.roster.places().values())
        say("the job finishes its step, saves a checkpoint and ends")
        self._driver.finish_early("ctl stop", STOP_CODE)
        await state.lifecycle.ended()
        return Ended(state.lifecycle.reason or "the run is finished", places)

    async def _checkpoint(self, request: TakeCheckpoint, say: Say) -> Message:
        step, state = await self._save(say), self._state
        await self._until(lambda: state.storing.uploading != step)
        if state.settings.checkpoint.store and state.storing.newest < step:
            raise NotPossible(f"checkpoint {name(step)} did not reach the store; the reason is in its event")
        return Done(f"checkpoint {state.saving.newest()} is complete")

    async def _save(self, say: Say) -> int:
        """Returns the number of steps in a new checkpoint. Raises NotPossible if it was not saved."""
        state, saving, storing = self._state, self._state.saving, self._state.storing
        if state.settings.emulate.mode:
            raise NotPossible("emulate=sleep saves no checkpoints")
        say("the next commit saves a checkpoint")
        await self._until(lambda: not saving.occupied)
        state.ending.save_asked = True
        await self._until(lambda: not state.ending.save_asked)
        step = saving.step
        await self._until(lambda: saving.step != step or not (saving.busy or storing.busy))
        if saving.newest_step < step:
            raise NotPossible(f"checkpoint {name(step)} was not saved; the reason is in its event")
        return step

    async def _read_stacks(self, request: ReadStacks, say: Say) -> Message:
        rank = self._alive(request.worker)
        self._stacks.pop(rank.number, None)
        rank.send(ShowStacks(rank.incarnation))
        await self._until(lambda: rank.number in self._stacks, STACKS_SECONDS)
        text = self._stacks.get(rank.number, "")
        if not text:
            raise NotPossible(f"worker {rank.role} wrote no stacks: its process is stopped, or has just begun or ended")
        return Done(text.rstrip())

    async def _profile(self, request: RecordProfile, say: Say) -> Message:
        rank, job = self._member(request.worker), self._state.job
        worker, incarnation = rank.role, rank.incarnation
        self._profiles.pop(rank.number, None)
        assert rank.worker is not None  # a member is connected
        rank.worker.send(Profile(request.steps))
        say(f"worker {worker} records {plural(request.steps, 'step')} from step {job.committed + 2} on")
        await self._until(lambda: rank.number in self._profiles or rank.incarnation != incarnation or not rank.alive)
        done = self._profiles.get(rank.number)
        if done is None:
            raise NotPossible(f"worker {worker} died before its profile was complete")
        if done.failed:
            raise NotPossible(f"worker {worker} could not write a profile: {done.failed}")
        return Done(f"{plural(done.steps, 'step')} of worker {worker}: {done.path}")

    async def _set(self, request: ChangeSettings, say: Say) -> Message:
        state = self._state
        try:
            values: dict[str, Value] = checked(state.settings, request.values)
        except ValueError as error:
            raise NotPossible(str(error)) from None
        say("the next commit sends the change to all workers")
        self._driver.drive(Changed(values))
        self._asked |= values
        # A later request for the same key may replace its value before any commit has it.
        await self._until(lambda: self._known.items() >= values.items() or not self._asked.items() >= values.items())
        for key, value in values.items():
            if self._asked[key] != value:
                raise NotPossible(f"{key} was set to {shown(self._asked[key])} by another request")
        return Done(f"{', '.join(_words(values))} from {when(state.job.committed + 1, state.settings.run.steps)} on")

    # -- helpers -----------------------------------------------------------------------------------------------

    def _has_left(self, worker: Worker) -> bool:
        """Whether no process plays this worker, and the last one was evicted."""
        ranks = [rank for rank in self._state.roster if rank.role == worker]
        deaths = [rank.causes.get(rank.incarnation) for rank in ranks]
        return not any(rank.alive for rank in ranks) and any(death and death.cause == "eviction" for death in deaths)

    def _alive(self, worker: tuple[int, int]) -> Rank:
        """The process that plays this worker. Raises NotPossible if there is none."""
        parallel, name = self._state.settings.parallel, Worker(*worker)
        if not (name.pipeline < parallel.pipelines and name.stage < parallel.stages):
            last = Worker(parallel.pipelines - 1, parallel.stages - 1)
            raise NotPossible(f"there is no worker {name}: the workers of this job are 0.0 to {last}")
        rank = next((rank for rank in self._state.roster if rank.role == name and rank.alive), None)
        if rank is None:
            raise NotPossible(f"worker {name} has no process now: it has died, has left, or was not started yet")
        return rank

    def _member(self, worker: tuple[int, int]) -> Rank:
        """The process that plays this worker. Raises NotPossible if there is none, or if it is not a member."""
        rank = self._alive(worker)
        if not self._state.job.started or rank.number not in self._state.job.live or rank.worker is None:
            raise NotPossible(f"worker {rank.role} does not take part in steps yet")
        return rank

    async def _until(self, done: Callable[[], bool], seconds: float = float("inf")) -> None:
        """Returns when done() is true, or after `seconds`. Raises NotPossible if the job ends first."""
        deadline = time.monotonic() + seconds
        while not done() and time.monotonic() < deadline:
            if self._state.lifecycle.over:
                raise NotPossible("the job ended first")
            await asyncio.sleep(_LOOK_SECONDS)


def _words(values: dict[str, Value]) -> list[str]:
    return [f"{key}={shown(value)}" for key, value in values.items()]
