"""The coordinator's conversation with workers: who may take part, what they say of steps, checkpoints and broken links.

rank = workers.welcome(peer, hello)             # None: nobody expects it any more, the connection ends
workers.hear(rank, incarnation, message)        # everything that it says from then on
workers.lost(rank, incarnation)                 # the connection ended
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from recycle_pp.consensus.refusal import REFUSED
from recycle_pp.protocol.events import MessageReceived, WorkerDescribed, WorkerEvicted, WorkerReady, WorkerReturned
from recycle_pp.telemetry.events.checkpoints import CheckpointSaved
from recycle_pp.telemetry.events.workers import Evicted, Refused
from recycle_pp.wire.connection import Peer
from recycle_pp.wire.messages.handshake import WorkerHello
from recycle_pp.wire.messages.table import Message, is_lasting, is_void
from recycle_pp.wire.messages.workers import (
    Assembled,
    Assembling,
    Broken,
    CannotRun,
    Digests,
    Evaluated,
    Finished,
    Leave,
    Leaving,
    LinksMeasured,
    Measured,
    OpProgress,
    Ready,
    Report,
    Resumed,
    Saved,
    SaveFailed,
    State,
    StoreValue,
    Synced,
    Unreachable,
    Vote,
    WorkerHeartbeat,
    WorkerWelcome,
)

from .broken_links import BrokenLinks
from .context import Context
from .deaths import Deaths
from .driver import Driver
from .ranks import Rank
from .returns import Returns
from .watch import Watch


class Workers:
    def __init__(self, context: Context, driver: Driver, deaths: Deaths, watch: Watch, returns: Returns) -> None:
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
        self._watch = watch
        self._links = BrokenLinks(context, driver, deaths, returns)
        self._heard: dict[tuple[int, type[Message], int], Message] = {}  # the last lasting messages
        self._platform: str | None = None  # of the first worker: see execution.device
        self._data = ""  # fingerprint of the first worker's training data
        self._printed: set[str] = set()  # notes of workers
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
            **dict.fromkeys((Report, Vote, Evaluated, Synced), self._receive),
        }

    def welcome(self, peer: Peer, hello: WorkerHello) -> Rank | None:
        if hello.rank not in self._roster:
            return None  # nobody has told it to come
        rank = self._roster[hello.rank]
        if hello.incarnation != rank.incarnation or not rank.alive:
            return None  # given up before it came: its generation is void
        if hello.moved and rank.worker is not peer:
            if rank.worker is None or rank.role not in self._driver.job.live:
                return None  # it comes from another coordinator, too late: likewise
            rank.worker.abort()  # its connection was reset: it says its `State` next
        rank.worker = peer
        rank.heard = time.monotonic()
        if not hello.moved:
            first_step = self._driver.job.first_step
            faults = self._restarts.faults_of(rank.role)
            peer.send(WorkerWelcome(self._settings, rank.role, str(self._run.path), first_step, faults))
        return rank

    def hear(self, rank: Rank, incarnation: int, message: Message) -> None:
        rank.heard = time.monotonic()
        if incarnation == rank.incarnation and rank.alive:
            self.handle(rank, message)

    def handle(self, rank: Rank, message: Message) -> None:
        """What it says now, or has said to a coordinator that was lost."""
        if is_lasting(message):
            self._heard[_kind(rank, message)] = message
        if not is_void(message, self._driver.job.generation):
            self._handlers[type(message)](rank, message)

    def lost(self, rank: Rank, incarnation: int, peer: Peer) -> None:
        """The connection ended. A member may return for a while after a reset, and if this coordinator was suspended or
        cut off; its supervisor reports a death anyway."""
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
        """A member whose connection was reset: whatever was on its way in either direction may be lost."""
        for said in message.said:
            if self._heard.get(_kind(rank, said)) != said:
                self.handle(rank, said)
        self._driver.drive(WorkerReturned(rank.role, message.committed))

    def _receive(self, rank: Rank, message: Message) -> None:
        self._driver.drive(MessageReceived(rank.role, message))

    def _beats(self, rank: Rank, message: WorkerHeartbeat) -> None:
        self._spans.heartbeat(rank.role, message)
        self._watch.worker_beats(rank, message)

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
        self._driver.drive(WorkerDescribed(rank.role, message.machine, message.blocks))
        fits = self._fits(rank, message.platform) and self._reads_the_same(rank, message.data)
        if fits and rank.role not in job.live:
            earliest = 0 if job.phase == "starting" else self._restarts.earliest(rank.role)
            self._driver.drive(WorkerReady(rank.role, earliest))

    def _cannot_run(self, rank: Rank, message: CannotRun) -> None:
        """What the user asks for cannot be done; but where others do it, only this worker, or its node, cannot."""
        job = self._driver.job
        if job.phase == "starting" or rank.role in job.live:
            self._lifecycle.stop(message.reason, code=2)
            return
        self._recorder.event(Refused(worker=str(rank.role), detail=message.reason))
        rank.worker.send(Leave())  # type: ignore[union-attr]  # it has just spoken

    def _fits(self, rank: Rank, platform: str) -> bool:
        """Peers must compute the same bits, so all workers have the platform of the first. At the start another one
        stops the job; who comes later is sent away."""
        self._platform = self._platform or platform
        if platform == self._platform:
            return True
        if self._driver.job.phase == "starting":
            reason = f"all workers need the same platform: worker {rank.role} has {platform}, not {self._platform}"
            self._lifecycle.stop(reason, code=2)
        else:
            self._recorder.event(Refused(worker=str(rank.role), platform=platform, expected=self._platform))
            self._restarts.earliest(rank.role)  # it need not come again
            rank.worker.send(Leave())  # type: ignore[union-attr]  # it has just spoken
        return False

    def _reads_the_same(self, rank: Rank, data: str) -> bool:
        """All workers read the training data of the first. At the start another worker with other data stops the job;
        later it is sent away."""
        self._data = self._data or data
        if data == self._data:
            return True
        where = f"on {rank.host or 'its host'}"
        if self._driver.job.phase == "starting":
            reason = f"data.path: all workers must read the same tokens, and worker {rank.role} {where} reads others"
            self._lifecycle.stop(reason, code=2)
        else:
            detail = f"data.path has changed {where}: its tokens are not those with which the job began"
            self._recorder.event(Refused(worker=str(rank.role), detail=detail))
            self._restarts.earliest(rank.role)  # it need not come again
            rank.worker.send(Leave())  # type: ignore[union-attr]  # it has just spoken
        return False

    def _leaving(self, rank: Rank, message: Leaving) -> None:
        if not self._lifecycle.over:
            self._recorder.event(Evicted(worker=str(rank.role)))
            self._driver.drive(WorkerEvicted(rank.role))

    def _finished(self, rank: Rank, message: Finished) -> None:
        self._driver.digests[rank.role] = message.digests
        self._receive(rank, message)

    def _assembled(self, rank: Rank, message: Assembled) -> None:
        self._saving.assembled(message)
        if self._lifecycle.over:  # why the job has stopped stays its last word
            return
        self._driver.ending.saved()
        self._recorder.event(CheckpointSaved(checkpoint=message.step))
        self._driver.finish_if_done()


def _kind(rank: Rank, message: Message) -> tuple[int, type[Message], int]:
    """Of two messages with the same key the later one replaces the earlier one, as in a worker's `State`."""
    return rank.number, type(message), getattr(message, "step", 0) % 2
