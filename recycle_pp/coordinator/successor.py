"""Takes over from a lost coordinator: restores the job from the reports of supervisors and workers.

    successor = Successor(state, driver, after_commit, deaths, workers, agreement, takeover, discovery)
    await successor.has_met(peer, hello)  # for each worker that has connected
    await successor.take_over()           # then the coordinator continues like any other

Some state of the old coordinator is lost, so unfinished joiners restart, and a validation may be repeated. An
unfinished checkpoint is abandoned if one of its writers has died too. But if it is the last checkpoint of the run, a
peer writes the missing part.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from recycle_schedules import Problem

from recycle_pp.consensus.agreement import Agreement
from recycle_pp.fitting.problem import relaid_problem
from recycle_pp.protocol.events import CoordinatorReplaced
from recycle_pp.protocol.takeover import Found, find
from recycle_pp.telemetry.background import READ_SECONDS
from recycle_pp.wire.connection import Peer
from recycle_pp.wire.frames import ChannelClosed
from recycle_pp.wire.messages.agreement import Takeover
from recycle_pp.wire.messages.handshake import WorkerHello
from recycle_pp.wire.messages.lifecycle import CannotRun, Leaving, Ready, StreamLost
from recycle_pp.wire.messages.saving import Assembled, Assembling
from recycle_pp.wire.messages.steps import Commit, Measured
from recycle_pp.wire.messages.table import Message
from recycle_pp.wire.messages.workers import FROM_WORKER, LASTING, State

from .after_commit import AfterCommit
from .deaths import Deaths
from .driver import Driver
from .failover_discovery import FailoverDiscovery
from .job import new_job
from .planning import load
from .ranks import Rank
from .state import JobState
from .workers import Workers

OF_PROCESS = (Ready, CannotRun, StreamLost, Leaving)  # void once another process has replaced the sender
DISCOVERY_SECONDS = 2.0  # minimum wait, because workers may still be trying to reach the lost coordinator


class Successor:
    def __init__(
        self,
        state: JobState,
        driver: Driver,
        after_commit: AfterCommit,
        deaths: Deaths,
        workers: Workers,
        agreement: Agreement,
        takeover: Takeover,
        discovery: FailoverDiscovery,
    ) -> None:
        self._state = state
        self._driver = driver
        self._after_commit = after_commit
        self._deaths = deaths
        self._workers = workers
        self._agreement = agreement
        self._takeover = takeover
        self.discovery = discovery

    async def has_met(self, peer: Peer, hello: WorkerHello) -> bool:
        """Receives the report of a worker that has moved to this coordinator, and waits until the takeover is complete.
        Returns False if the connection broke, the report is invalid or too late, or the worker has reconnected."""
        if not hello.moved or self.discovery.over.is_set():
            await self.discovery.over.wait()
            return True
        try:
            report = await peer.recv(FROM_WORKER)
        except ChannelClosed:
            return False
        if not isinstance(report, State) or self.discovery.over.is_set():  # after a late report the worker reconnects
            return False
        self.discovery.worker(hello.rank, hello.incarnation, report, peer)
        await self.discovery.over.wait()
        return self.discovery.workers[hello.rank].peer is peer

    async def take_over(self) -> None:
        """Restores the job from the reports. `CoordinatorReplaced` restores the protocol's part of it."""
        state, saving = self._state, self._state.saving
        control, parallel = state.settings.control, state.settings.parallel
        reading = asyncio.gather(state.recorder.read_history(), load(state.profile, state.run.profile))
        looking = asyncio.create_task(saving.look())
        patience = max(control.suspicion, DISCOVERY_SECONDS)
        await self.discovery.complete(await self._agreement.supervisors(), patience)
        agreed, whole = await self._agreement.generation(), None
        began, unread = agreed >= 0, "no checkpoint could be read"
        await asyncio.wait({looking}, timeout=READ_SECONDS)
        await reading
        await state.lease.wait()
        while not began and whole is None and not self.discovery.states():
            try:
                whole = (await saving.whole()).step
            except ValueError as error:
                whole, unread = 0, str(error)
            await state.lease.wait()
        # No `await` from here on: a death during an `await` would be missing from both the reports and the events.
        states = self.discovery.states()
        found = find(states)
        committed = max((known.committed for known in states.values()), default=(whole or 0) - 1)
        # Whether new processes have replaced all those of the agreed generation, for instance because a stage was lost.
        # With etcd another part of the job may still run that generation.
        replaced = began and found.generation < 0 and committed < 0 and self.discovery.alive
        restarts = replaced and state.settings.control.coordinator != "etcd"
        lost = began and not states and not restarts
        self.discovery.fill(state.roster, parallel.pipelines * parallel.stages)
        steps = state.settings.run.steps
        if saving.newest_step == steps and committed < steps - 1:
            self.discovery.over.set()
            state.lifecycle.end(0)  # the job finished while this supervisor was suspended
            return
        # Before the first generation, all workers start from the same checkpoint. Later, new workers copy from peers.
        assignment = self.discovery.assignment(parallel.pipelines, parallel.stages)
        job = new_job(state.settings, 0 if found.begun else committed + 1, found.generation, committed, assignment)
        state.begin(job)
        state.recorder.took_over(self._takeover, found)
        if lost:
            state.lifecycle.stop(_lost(saving.newest(), looking.done()))
        if whole == 0 and state.settings.run.resume:
            state.lifecycle.stop(f"run.resume=true: {unread}")
        self._driver.change(self._problem(found))
        if restarts:
            # The outcome is a lost stage, so `Deaths` restarts all workers from the newest checkpoint.
            self._driver.drive(CoordinatorReplaced(replace(found, generation=agreed)))
        elif found.begun:
            state.restarts.taken_over({found.members[member] for member in found.live}, found.committed)
            self._continue_saving(found)
            self._driver.drive(CoordinatorReplaced(found))
        for rank in state.roster:
            rank.last_message = time.monotonic()
            if not state.lifecycle.over:
                self._restore_rank(rank, found)
        self.discovery.over.set()
        repeated = self.discovery.repeated()
        self._handle_again(repeated, (Measured,))
        if found.commit is not None:
            state.recorder.record_missing_commit(found.commit)
        # Handle assemblies before saved parts; otherwise a checkpoint would be assembled twice.
        self._handle_again(repeated, (Assembling, Assembled))
        self._handle_again(repeated, set(LASTING) - {Measured, Assembling, Assembled})
        if found.commit is not None:
            self._continue_storing(found.commit)
        # The newest commit may name savers that have died since, so handle their deaths now.
        self._driver.send(saving.only(state.job.live))
        self._deaths.respawn_due()

    def _problem(self, found: Found) -> Problem:
        """The job's problem, with the current layers of its stages."""
        job, layers, profile = self._state.job, self._state.layers, self._state.profile
        problem = job.problem
        for _, message in self.discovery.repeated():
            if isinstance(message, Ready):
                layers.describe(message.depth, message.stays, message.units)
        if layout := layers.counts(found.layout):
            profile.relayout(layout)
            problem = relaid_problem(problem, layers.settings(layout), layers.start, layout)
        return profile.problem(problem)

    def _handle_again(self, repeated: Sequence[tuple[int, Message]], kinds: Collection[type[Message]]) -> None:
        for number, message in sorted(repeated, key=lambda each: -getattr(each[1], "step", 0)):  # the newest first
            rank = self._state.roster[number]
            over = rank.incarnation != self.discovery.workers[number].incarnation  # `_restore_rank` started a new one
            if type(message) in kinds and not (over and type(message) in OF_PROCESS):
                self._workers.handle(rank, message)

    def _restore_rank(self, rank: Rank, found: Found) -> None:
        """Starts a worker that is not a member, or whose new process has not joined yet. Records a dead or unreachable
        one. Skips live members."""
        for incarnation, death in rank.causes.items():
            if death.where and incarnation != rank.incarnation:  # `found_after_failover` records the newest death
                self._state.restarts.failed(death.where, rank.role)
        if rank.number in found.live or (rank.alive and not found.begun):
            return
        unfinished = rank.number not in found.members or rank.number in found.replaced
        if rank.incarnation < 0 or (rank.alive and unfinished):
            rank.spawn()
        else:
            self._deaths.found_after_failover(rank, found.begun)

    def _continue_saving(self, found: Found) -> None:
        """Continues an unfinished checkpoint. Workers resend their reports about its parts."""
        commit = found.commit
        if commit is None or not commit.savers or self._state.settings.emulate.mode:
            return
        if commit.step + 1 not in self._state.saving.found:
            self._after_commit.begin_saving(commit, found.informed)

    def _continue_storing(self, commit: Commit) -> None:
        """Continues the upload of a finished checkpoint, if its assembler was lost with the earlier coordinator and
        therefore has not resent `Assembled`."""
        step, saving = commit.step + 1, self._state.saving
        stored = self._state.settings.checkpoint.store is None or step <= saving.stored_step
        if commit.savers and not stored and (parts := saving.found.get(step)) is not None:
            outer = None if commit.outer is None else commit.outer.state
            self._after_commit.store(Assembled(step, True, parts, outer), commit.last)


def _lost(newest: Path | str | None, looked: bool) -> str:
    text = "the coordinator and all workers were lost at once; "
    again = "start again with run.resume=true, which continues from"
    if newest is not None:
        return f"{text}{again} checkpoint {Path(newest).name}"
    if not looked:
        return f"{text}{again} the newest checkpoint; the run folder or the store currently does not answer"
    return text + "there is no checkpoint to continue from"
