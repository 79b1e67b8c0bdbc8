"""The coordinator in the place of one that was lost: it begins with what supervisors and workers say of themselves.

    coordinator = Successor(settings, run, events, progress, agreement, leader, takeover, token)
    code = await coordinator.run()        # as any other from now on

What is lost of the old one's memory can be done without: who was still catching up begins anew, a validation may be
repeated, a checkpoint whose writer died with it is given up (the last one of a run is written by somebody else).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

from recycle_pp.consensus.agreement import Deposed
from recycle_pp.protocol.events import CoordinatorReplaced
from recycle_pp.protocol.takeover import Found, find
from recycle_pp.telemetry.background import in_thread
from recycle_pp.telemetry.history import History
from recycle_pp.telemetry.takeover import Takeover
from recycle_pp.wire.connection import Peer
from recycle_pp.wire.frames import ChannelClosed
from recycle_pp.wire.messages.handshake import WorkerHello
from recycle_pp.wire.messages.supervisors import Died, Present
from recycle_pp.wire.messages.table import Message
from recycle_pp.wire.messages.workers import FROM_WORKER, LASTING, Assembled, Assembling, Measured, State

from .checkpoints import newest_whole
from .coordinator import Coordinator
from .failover_discovery import FailoverDiscovery
from .job import new_job
from .ranks import Rank

HISTORY_SECONDS = 2.0  # for what is in the run folder of the time before

DISCOVERY_SECONDS = 2.0  # at least, for workers that may still be connecting to the coordinator that was lost


class Successor(Coordinator):
    def __init__(self, *arguments: Any, takeover: Takeover, token: str) -> None:
        super().__init__(*arguments)
        self._takeover = takeover
        self._discovery = FailoverDiscovery(token)

    async def run(self) -> int:
        with suppress(Deposed):
            await self._take_over()
        return await super().run()

    def _hear_supervisor(self, number: int, message: Message, peer: Peer) -> None:
        if self._discovery.over.is_set():
            super()._hear_supervisor(number, message, peer)
        elif isinstance(message, Present):
            self._discovery.supervisor(number, message, peer)
        elif isinstance(message, Died):
            self._discovery.died(number, message)

    def _lose_supervisor(self, number: int, peer: Peer) -> None:
        if self._discovery.over.is_set():
            super()._lose_supervisor(number, peer)
        else:
            self._discovery.supervisors.pop(number, None)

    async def _handle_worker(self, peer: Peer, hello: WorkerHello) -> None:
        await self.lease.wait()
        if hello.moved and not self._discovery.over.is_set():
            try:
                state = await peer.recv(FROM_WORKER)
            except ChannelClosed:
                return  # it has died, or the connection broke, before it could say anything
            if not isinstance(state, State):
                return  # of no use: the connection ends
            self._discovery.worker(hello.rank, hello.incarnation, state, peer)
        await self._discovery.over.wait()
        await super()._handle_worker(peer, hello)

    async def _take_over(self) -> None:
        """From what supervisors and workers say of themselves; `Job.take_over` has the protocol's part of it."""
        control, parallel = self._settings.control, self._settings.parallel
        reading = asyncio.create_task(self._history())
        patience = max(control.suspicion, DISCOVERY_SECONDS)
        await self._discovery.complete(await self._agreement.supervisors(), patience)
        states = self._discovery.states()
        found = find(states)
        begun = found.begun
        committed = max((state.committed for state in states.values()), default=-1)
        if not states and self._settings.run.resume:
            committed = (await in_thread(newest_whole, self._run.checkpoints)).step - 1
        history = await reading
        if not states:  # then only the run folder knows how far the job was: it is waited for however slow it is
            history = await in_thread(History.read, self._run)
        await self.lease.wait()
        self._driver.saving.known(history.checkpoint)
        # Before the first generation all begin at the same checkpoint; who comes later gets the state from a peer.
        job = self._driver.job = new_job(self._settings, 0 if begun else committed + 1, found.generation)
        job.committed = committed
        self._roster.update(self._discovery.ranks(parallel.pipelines, parallel.stages))
        self._recorder.took_over(job, self._takeover, history, found.members - found.live)
        self._driver.change(self._driver.planning.take_up(history.profile, job.problem))
        if not states and history.step > committed:
            self.stop(_lost(history))
        elif begun:
            self._recorder.remove_undone()
            self._restarts.taken_over(found.live, found.committed)
            await self._go_on_saving(found)
            self._driver.drive(CoordinatorReplaced(found))
        for rank in self._roster:
            rank.heard = time.monotonic()
            if not self.over:
                self._bring_in(rank, found, str(rank.role) in history.dead)
        self._discovery.over.set()
        said = self._discovery.said()
        self._hear_again(said, (Measured,))
        if found.commit is not None:
            self._recorder.record_missing_commit(found.commit)
        # Who assembles a checkpoint comes before who has saved a part of it: or it would be assembled once more.
        self._hear_again(said, (Assembling, Assembled))
        self._hear_again(said, set(LASTING) - {Measured, Assembling, Assembled})
        # Who should save may have died before the newest membership.
        self._driver.send(self._driver.saving.only(self._driver.job.live))
        self._deaths.respawn_due()

    def _hear_again(self, said: Sequence[tuple[int, Message]], kinds: Collection[type[Message]]) -> None:
        for number, message in said:
            if type(message) in kinds:
                self._workers.handle(self._roster[number], message)

    def _bring_in(self, rank: Rank, found: Found, recorded: bool) -> None:
        """The dead get their event; who lives and is no member begins anew."""
        begun = found.begun
        for death in rank.causes.values():
            if death.where:
                self._restarts.failed(death.where, rank.role)
        if rank.role in found.live or (rank.alive and not begun):
            return
        if rank.incarnation < 0 or (rank.alive and rank.role not in found.members):
            rank.spawn()
        else:
            self._deaths.found(rank, begun, recorded)

    async def _history(self) -> History:
        """What the coordinator before has written; nothing of it if the disk is slow."""
        try:
            return await asyncio.wait_for(in_thread(History.read, self._run), HISTORY_SECONDS)
        except (OSError, TimeoutError):
            return History()

    async def _go_on_saving(self, found: Found) -> None:
        """A checkpoint that was under way: what is done of it will be said again."""
        savers = found.commit.savers if found.commit else []
        done = found.committed + 1
        if not savers or self._settings.emulate.mode:
            return
        if not await in_thread(self._driver.saving.path(done).exists):
            self._driver.saving.begin(done, savers, found.commit is not None and found.commit.last, found.told)


def _lost(history: History) -> str:
    text = f"the coordinator and all workers were lost at once, in step {history.step + 1}; "
    if history.checkpoint:
        return text + f"start again with run.resume=true, which continues from checkpoint step-{history.checkpoint:06d}"
    return text + "there is no checkpoint to continue from"
