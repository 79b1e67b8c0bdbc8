"""The workers' connections: admission, and messages about steps, checkpoints and broken links.

rank = workers.welcome(peer, hello)             # None: the worker is no longer expected, close the connection
workers.receive(rank, incarnation, message)     # each later message
workers.lost(rank, incarnation)                 # the connection ended
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from recycle_pp.consensus.refusal import REFUSED
from recycle_pp.protocol.events import (
    FromWorker,
    MessageReceived,
    WorkerDescribed,
    WorkerEvicted,
    WorkerReady,
    WorkerReturned,
)
from recycle_pp.telemetry.events.checkpoints import CheckpointSaved
from recycle_pp.telemetry.events.workers import Evicted, Refused
from recycle_pp.wire.connection import Peer
from recycle_pp.wire.messages.generations import Broken, LinksMeasured, Report, Resumed, Unreachable
from recycle_pp.wire.messages.handshake import WorkerHello
from recycle_pp.wire.messages.lifecycle import (
    CannotRun,
    Leave,
    Leaving,
    Ready,
    StoreValue,
    Synced,
    WorkerHeartbeat,
    WorkerWelcome,
)
from recycle_pp.wire.messages.saving import Assembled, Assembling, Digests, Finished, Saved, SaveFailed
from recycle_pp.wire.messages.steps import Evaluated, Measured, OpProgress, Vote
from recycle_pp.wire.messages.table import Message, is_lasting, is_void
from recycle_pp.wire.messages.workers import State

from .broken_links import BrokenLinks
from .context import Context
from .deaths import Deaths
from .driver import Driver
from .hang_detector import HangDetector
from .ranks import Rank
from .returns import Returns


class Workers:
    def __init__(self, context: Context, driver: Driver, deaths: Deaths, hangs: HangDetector, returns: Returns) -> None:
        self._settings = context.settings
        self._run = context.run
        self._timers = context.timers
        self._roster = context.roster
        self._restarts = context.restarts
        self._recorder = context.recorder
        self._lifecycle = context.lifecycle
        self._spans = context.spans
        self._lease = context.lease
        self._driver = driver
        self._saving = driver.saving
        self._deaths = deaths
        self._hangs = hangs
        self._links = BrokenLinks(context, driver, deaths, returns)
        self._received: dict[tuple[int, type[Message], int], Message] = {}  # the last lasting messages
        self._platform: str | None = None  # platform of the first worker: see execution.device
        self._data = ""  # fingerprint of the first worker's training data
        self._printed: set[str] = set()  # printed notes of workers
        self._handlers: dict[type[Message], Callable[[Rank, Any], None]] = {
            WorkerHeartbeat: self._beats,
            StoreValue: lambda rank, message: self._roster.publish(message.key, message.value),
            Measured: self._measured,
            OpProgress: lambda rank, message: self._recorder.progress(rank.role, message),
            Resumed: lambda rank, message: self._recorder.resumed(rank.role, message),
            Broken: self._links.broken,
            Unreachable: self._links.unreachable,
            Ready: self._ready,
            CannotRun: self._cannot_run,
            Leaving: self._leaving,
            LinksMeasured: lambda rank, message: self._driver.planning.links_measured(message),
            Finished: self._finished,
            Saved: lambda rank, message: self._driver.send(self._saving.saved(rank.role, message)),
            SaveFailed: lambda rank, message: self._driver.save_failed(message, rank.role),
            Digests: lambda rank, message: self._driver.compare(rank.role, message),
            Assembling: lambda rank, message: self._saving.assembling(rank.role, message),
            Assembled: self._assembled,
            State: self._returned,
            **dict.fromkeys((Report, Vote, Evaluated, Synced), self._drive),
        }

    def welcome(self, peer: Peer, hello: WorkerHello) -> Rank | None:
        if hello.rank not in self._roster:
            return None  # it was not started by this job
        rank = self._roster[hello.rank]
        if hello.incarnation != rank.incarnation or not rank.alive:
            return None  # it was given up before it connected
        if hello.moved and rank.worker is not peer:
            if rank.worker is None or rank.role not in self._driver.job.live:
                return None  # it comes from another coordinator, too late
            rank.worker.abort()  # the worker's connection was reset; it sends its `State` next
        rank.worker = peer
        rank.last_message = time.monotonic()
        if not hello.moved:
            first_step = self._driver.job.first_step
            faults = self._restarts.faults_of(rank.role)
            peer.send(WorkerWelcome(self._settings, rank.role, str(self._run.path), first_step, faults))
        return rank

    def receive(self, rank: Rank, incarnation: int, message: Message) -> None:
        rank.last_message = time.monotonic()
        if incarnation == rank.incarnation and rank.alive:
            self.handle(rank, message)

    def handle(self, rank: Rank, message: Message) -> None:
        """Handles a message to this coordinator, or one that a worker repeats after the loss of another coordinator."""
        if is_lasting(message):
            self._received[_kind(rank, message)] = message
        if not is_void(message, self._driver.job.generation):
            self._handlers[type(message)](rank, message)

    def lost(self, rank: Rank, incarnation: int, peer: Peer) -> None:
        """The connection ended. A member has some time to reconnect after a reset, or if this coordinator was suspended
        or cut off. Its supervisor reports a death in any case."""
        waits = peer.was_reset or self._lease.lapsed(self._settings.control.suspicion)
        if waits and rank.role in self._driver.job.live:
            seconds = min(REFUSED, self._settings.control.suspicion)
            self._timers.after(seconds, self._has_not_returned, rank, incarnation, peer)
        else:
            self._has_not_returned(rank, incarnation, peer)

    def _has_not_returned(self, rank: Rank, incarnation: int, peer: Peer) -> None:
        if rank.worker is peer and not self._lifecycle.over:
            self._deaths.disconnected(rank, incarnation)

    def _returned(self, rank: Rank, message: State) -> None:
        """Handles a member that has reconnected. Messages in both directions may have been lost."""
        for repeated in message.said:
            if self._received.get(_kind(rank, repeated)) != repeated:
                self.handle(rank, repeated)
        self._driver.drive(WorkerReturned(rank.role, message.committed))
        self._driver.send(self._saving.returned(rank.role))

    def _drive(self, rank: Rank, message: FromWorker) -> None:
        self._driver.drive(MessageReceived(rank.role, message))

    def _beats(self, rank: Rank, message: WorkerHeartbeat) -> None:
        self._spans.heartbeat(rank.role, message)
        self._hangs.worker_beats(rank, message)

    def _measured(self, rank: Rank, message: Measured) -> None:
        self._spans.add(rank.role, message)
        self._recorder.measured(rank.role, message)

    def _ready(self, rank: Rank, message: Ready) -> None:
        rank.address = message.address
        job = self._driver.job
        self._driver.change(self._driver.planning.introduced(rank.role, message, job.problem))
        for note in message.notes:
            if note not in self._printed:
                self._printed.add(note)
                self._recorder.say(note)
        self._driver.drive(WorkerDescribed(rank.role, message.machine, message.units))
        fits = self._fits(rank, message.platform) and self._reads_the_same(rank, message.data)
        if fits and rank.role not in job.live:
            earliest = 0 if job.phase == "starting" else self._restarts.earliest(rank.role)
            self._driver.drive(WorkerReady(rank.role, earliest))

    def _cannot_run(self, rank: Rank, message: CannotRun) -> None:
        """Rejects a worker that cannot run the job. At the start, or if it is a member, the job stops."""
        job = self._driver.job
        if job.phase == "starting" or rank.role in job.live:
            self._lifecycle.stop(message.reason, code=2)
            return
        self._recorder.event(Refused(worker=str(rank.role), detail=message.reason))
        rank.worker.send(Leave())  # type: ignore[union-attr]  # connected: it has just sent this message

    def _fits(self, rank: Rank, platform: str) -> bool:
        """Whether the platform is that of the first worker: all workers must compute the same bits. While the job
        starts, a worker with another platform stops the job; later, only this worker is rejected."""
        self._platform = self._platform or platform
        if platform == self._platform:
            return True
        if self._driver.job.phase == "starting":
            reason = f"all workers need the same platform: worker {rank.role} has {platform}, not {self._platform}"
            self._lifecycle.stop(reason, code=2)
        else:
            self._recorder.event(Refused(worker=str(rank.role), platform=platform, expected=self._platform))
            self._restarts.earliest(rank.role)  # called only to remove the worker's `+rejoin_at`
            rank.worker.send(Leave())  # type: ignore[union-attr]  # connected: it has just sent this message
        return False

    def _reads_the_same(self, rank: Rank, data: str) -> bool:
        """Whether the training data is that of the first worker. While the job starts, a worker with other data stops
        the job; later, only this worker is rejected."""
        self._data = self._data or data
        if data == self._data:
            return True
        where = f"on {rank.host or 'its host'}"
        if self._driver.job.phase == "starting":
            reason = (
                f"data.path: all workers must read the same tokens, but worker {rank.role} {where} reads different ones"
            )
            self._lifecycle.stop(reason, code=2)
        else:
            detail = f"data.path has changed {where}: its tokens differ from those at the start of the job"
            self._recorder.event(Refused(worker=str(rank.role), detail=detail))
            self._restarts.earliest(rank.role)  # called only to remove the worker's `+rejoin_at`
            rank.worker.send(Leave())  # type: ignore[union-attr]  # connected: it has just sent this message
        return False

    def _leaving(self, rank: Rank, message: Leaving) -> None:
        if not self._lifecycle.over:
            self._recorder.event(Evicted(worker=str(rank.role)))
            self._driver.drive(WorkerEvicted(rank.role))

    def _finished(self, rank: Rank, message: Finished) -> None:
        self._driver.digests[rank.role] = message.digests
        self._drive(rank, message)

    def _assembled(self, rank: Rank, message: Assembled) -> None:
        self._saving.assembled(message)
        if self._lifecycle.over:  # the last event must be the reason of the stop
            return
        self._driver.ending.saved()
        self._recorder.event(CheckpointSaved(checkpoint=message.step))
        self._driver.finish_if_done()


def _kind(rank: Rank, message: Message) -> tuple[int, type[Message], int]:
    """A key: a later message replaces an earlier one with the same key, as in a worker's `State`."""
    return rank.number, type(message), getattr(message, "step", 0) % 2
