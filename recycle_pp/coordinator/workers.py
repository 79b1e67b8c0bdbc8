"""Handles the workers' connections: admission, and messages about steps, checkpoints and broken links.

rank = workers.welcome(peer, hello)             # None: close the connection, because this worker is not expected
workers.receive(rank, incarnation, message)     # each later message
workers.lost(rank, incarnation, peer)           # the connection ended
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from recycle_pp.consensus.refusal import REFUSED
from recycle_pp.fitting.problem import memory_of
from recycle_pp.protocol.events import (
    FromWorker,
    MessageReceived,
    WorkerDescribed,
    WorkerEvicted,
    WorkerReady,
    WorkerReturned,
)
from recycle_pp.telemetry.events.workers import Evicted, Refused
from recycle_pp.wire.connection import Peer
from recycle_pp.wire.messages.generations import Broken, LinksMeasured, Report, Resumed, Unreachable
from recycle_pp.wire.messages.handshake import WorkerHello
from recycle_pp.wire.messages.islands import CutMissing, IslandsSeen, RoundReady, StoreTraffic
from recycle_pp.wire.messages.lifecycle import (
    CannotRun,
    FirstOps,
    Leave,
    Leaving,
    NoRoom,
    Prepared,
    Profiled,
    Ready,
    StoreValue,
    StreamLost,
    Synced,
    WorkerHeartbeat,
    WorkerWelcome,
)
from recycle_pp.wire.messages.saving import (
    Assembled,
    Assembling,
    Digests,
    Finished,
    Saved,
    SaveFailed,
    Sealed,
    Uploaded,
    UploadFailed,
)
from recycle_pp.wire.messages.steps import Evaluated, Measured, OpProgress, Vote
from recycle_pp.wire.messages.table import Message, is_lasting, is_void
from recycle_pp.wire.messages.workers import State

from .after_commit import AfterCommit
from .broken_links import BrokenLinks
from .deaths import Deaths
from .driver import Driver
from .hang_detector import HangDetector
from .operators import Operators
from .ranks import Rank
from .rebalancing import Rebalancing
from .rounds import Rounds
from .state import JobState


class Workers:
    def __init__(
        self,
        state: JobState,
        driver: Driver,
        after_commit: AfterCommit,
        deaths: Deaths,
        hangs: HangDetector,
        links: BrokenLinks,
        rebalancing: Rebalancing,
        operators: Operators,
        rounds: Rounds,
    ) -> None:
        self._state = state
        self._rebalancing = rebalancing
        self._driver = driver
        self._deaths = deaths
        self._hangs = hangs
        self._received: dict[tuple[int, type[Message], int], Message] = {}  # newest lasting message, by `_kind`
        self._platform: str | None = None  # platform of the first worker: see execution.device
        self._data = ""  # fingerprint of the first worker's training data
        self._origin = ""  # digest of the first worker's model.path, if parameters are frozen
        self._printed: set[str] = set()  # workers' notes that have been printed
        self._handlers: dict[type[Message], Callable[[Rank, Any], None]] = {
            WorkerHeartbeat: self._beats,
            StoreValue: lambda rank, message: state.roster.publish(message.key, message.value),
            Measured: self._measured,
            OpProgress: lambda rank, message: state.recorder.progress(rank.role, message),
            Resumed: self._resumed,
            Broken: links.broken,
            Unreachable: links.unreachable,
            Ready: self._ready,
            FirstOps: lambda rank, message: state.recorder.first_ops(rank.role, rank.host, message),
            CannotRun: self._cannot_run,
            Leaving: self._leaving,
            LinksMeasured: lambda rank, message: state.profile.links.measured(message.machine, message.found),
            Finished: self._finished,
            Saved: after_commit.saved,
            SaveFailed: after_commit.save_failed,
            Digests: after_commit.compare,
            Assembling: after_commit.assembling,
            Assembled: after_commit.assembled,
            Uploaded: after_commit.uploaded,
            UploadFailed: after_commit.upload_failed,
            Sealed: after_commit.sealed,
            Profiled: operators.profiled,
            State: self._returned,
            StoreTraffic: lambda rank, message: rounds.traffic(message),
            IslandsSeen: lambda rank, message: rounds.seen(message),
            **dict.fromkeys(
                (Report, Vote, Evaluated, Synced, StreamLost, Prepared, NoRoom, RoundReady, CutMissing), self._drive
            ),
        }

    def welcome(self, peer: Peer, hello: WorkerHello) -> Rank | None:
        if hello.rank not in self._state.roster:
            return None  # the worker was not started by this job
        rank = self._state.roster[hello.rank]
        if hello.incarnation != rank.incarnation or not rank.alive:
            return None  # the worker was declared dead before it connected
        if hello.moved and rank.worker is not peer:
            if rank.worker is None or rank.number not in self._state.job.live:
                return None  # the worker missed the takeover by this coordinator
            rank.worker.abort()  # the worker's old connection was reset; on the new one it sends its `State` next
        rank.worker = peer
        rank.last_message = time.monotonic()
        if not hello.moved:
            job = self._state.job
            resume = job.first_step if job.phase == "starting" else 0  # a joiner gets its state from peers
            faults = self._state.restarts.faults_of(rank.role)
            layers = self._state.layers
            settings = layers.settings(layers.counts(job.units.layout))
            # After the first commit, every new worker gets all state from peers, so it needs no initial values.
            joins = job.phase != "starting" and job.committed >= job.first_step
            peer.send(WorkerWelcome(settings, rank.role, str(self._state.run.path), resume, faults, joins))
        return rank

    def receive(self, rank: Rank, incarnation: int, message: Message) -> None:
        rank.last_message = time.monotonic()
        if incarnation == rank.incarnation and rank.alive:
            self.handle(rank, message)

    def handle(self, rank: Rank, message: Message) -> None:
        """Handles a new message, or one that a worker resends after the loss of a coordinator."""
        if is_lasting(message):
            self._received[_kind(rank, message)] = message
        if not is_void(message, self._state.job.generation):
            self._handlers[type(message)](rank, message)

    def lost(self, rank: Rank, incarnation: int, peer: Peer) -> None:
        """Handles the end of a connection, which usually means that the worker died. In three cases the worker has some
        time to reconnect; if it is dead, its supervisor reports that anyway:

        - The connection was reset.
        - This coordinator was suspended or cut off.
        - The worker is not a member yet. A worker that is not admitted within a second reconnects.
        """
        suspicion = self._state.settings.control.suspicion
        joins = rank.number not in self._state.job.live
        if joins or peer.was_reset or self._state.lease.lapsed(suspicion):
            seconds = min(REFUSED, suspicion)
            self._state.timers.after(seconds, self._has_not_returned, rank, incarnation, peer)
        else:
            self._has_not_returned(rank, incarnation, peer)

    def _has_not_returned(self, rank: Rank, incarnation: int, peer: Peer) -> None:
        if rank.worker is peer and not self._state.lifecycle.over:
            self._deaths.disconnected(rank, incarnation)

    def _returned(self, rank: Rank, message: State) -> None:
        """Handles a reconnected member. Messages in both directions may have been lost."""
        for repeated in message.said:
            if self._received.get(_kind(rank, repeated)) != repeated:
                self.handle(rank, repeated)
        self._driver.drive(WorkerReturned(rank.number, message.committed))
        self._driver.send(self._state.saving.returned(rank.number))
        self._driver.send(self._state.storing.returned(rank.number))

    def _drive(self, rank: Rank, message: FromWorker) -> None:
        self._driver.drive(MessageReceived(rank.number, message))

    def _beats(self, rank: Rank, message: WorkerHeartbeat) -> None:
        self._state.spans.heartbeat(rank.role, message)
        self._hangs.worker_beats(rank, message)

    def _measured(self, rank: Rank, message: Measured) -> None:
        self._state.spans.add(rank.role, message)
        self._state.recorder.measured(rank.role, message)

    def _resumed(self, rank: Rank, message: Resumed) -> None:
        self._state.recorder.resumed(rank.role, message)
        self._rebalancing.resumed(rank, message)

    def _ready(self, rank: Rank, message: Ready) -> None:
        job, profile = self._state.job, self._state.profile
        profile.describe(rank.role.stage, message.boundary_bytes, message.deferred_share, message.memory)
        # If the address is known, the worker has sent `Ready` again, because layers have moved.
        if rank.address != message.address:
            rank.address, rank.machine, rank.cores = message.address, message.machine, message.cores
            profile.place(rank.role, message.machine, message.cores)
        layers = self._state.layers
        layers.describe(message.depth, message.stays, message.units)
        self._state.recorder.described(message)
        if profile.memory is not None and job.problem.memory is None:
            memory = memory_of(self._state.settings, profile.memory)
            self._driver.change(job.problem.replace(memory=memory))
        moves = layers.what_moves if job.phase == "starting" else None
        for note in [*message.notes, *([moves] if moves else [])]:
            if note not in self._printed:
                self._printed.add(note)
                self._state.recorder.say(note)
        self._driver.drive(WorkerDescribed(rank.number, message.machine, message.units, message.outer))
        if self._fits(rank, message) and rank.number not in job.live:
            earliest = 0 if job.phase == "starting" else self._state.restarts.earliest(rank.role)
            self._driver.drive(WorkerReady(rank.number, earliest))

    def _cannot_run(self, rank: Rank, message: CannotRun) -> None:
        """Rejects a worker that cannot run the job. If the job is starting or the worker is a member, stops the job
        instead."""
        job = self._state.job
        if job.phase == "starting" or rank.number in job.live:
            self._state.lifecycle.stop(message.reason, code=2)
            return
        self._reject(rank, Refused(worker=str(rank.role), detail=message.reason))

    def _fits(self, rank: Rank, message: Ready) -> bool:
        """Whether the worker has the platform, training data and frozen parameters of the first one, so that all
        compute the same bits. Otherwise a starting job is stopped, but a running one only rejects the worker."""
        self._platform = self._platform or message.platform
        self._data, self._origin = self._data or message.data, self._origin or message.origin
        worker, where = str(rank.role), f"on {rank.host or 'its host'}"
        if message.platform != self._platform:
            reason = f"all workers need the same platform: worker {worker} has {message.platform}, not {self._platform}"
            refused = Refused(worker=worker, platform=message.platform, expected=self._platform)
        elif message.data != self._data:
            reason = (
                f"data.path: all workers must read the same tokens, but worker {worker} {where} reads different ones"
            )
            detail = f"data.path has changed {where}: its tokens differ from those at the start of the job"
            refused = Refused(worker=worker, detail=detail)
        elif message.origin != self._origin:
            reason = (
                f"model.path: all workers must read the same weights, but worker {worker} {where} reads different ones"
            )
            detail = f"model.path {where} contains different weights than at the start of the job"
            refused = Refused(worker=worker, detail=detail)
        else:
            return True
        if self._state.job.phase == "starting":
            self._state.lifecycle.stop(reason, code=2)
        else:
            self._reject(rank, refused)
            self._state.restarts.earliest(rank.role)  # called only to remove the worker's `+rejoin_at`
        return False

    def _reject(self, rank: Rank, refused: Refused) -> None:
        self._state.recorder.event(refused)
        rank.worker.send(Leave())  # type: ignore[union-attr]  # connected: it has just sent a message

    def _leaving(self, rank: Rank, message: Leaving) -> None:
        if not self._state.lifecycle.over:
            self._state.recorder.event(Evicted(worker=str(rank.role)))
            self._driver.drive(WorkerEvicted(rank.number))

    def _finished(self, rank: Rank, message: Finished) -> None:
        self._state.digests[rank.role] = message.digests
        self._drive(rank, message)


def _kind(rank: Rank, message: Message) -> tuple[int, type[Message], int]:
    """The key of a lasting message. A later message replaces an earlier one with the same key, as in `State.said`."""
    return rank.number, type(message), getattr(message, "step", 0) % 2
