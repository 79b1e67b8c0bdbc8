"""The coordinator that replaces a lost one. It starts from the reports of supervisors and workers.

    coordinator = Successor(settings, run, events, progress, agreement, leader, takeover, token)
    code = await coordinator.run()        # takes over, then runs like any coordinator

Some of the old coordinator's memory is lost. A joiner that had not finished restarts, a validation may be repeated, and
a checkpoint is abandoned if its writer died too; a peer writes the last checkpoint of a run again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from recycle_pp.consensus.agreement import Deposed
from recycle_pp.protocol.events import CoordinatorReplaced
from recycle_pp.protocol.takeover import Found, find
from recycle_pp.telemetry.background import READ_SECONDS
from recycle_pp.wire.connection import Peer
from recycle_pp.wire.frames import ChannelClosed
from recycle_pp.wire.messages.agreement import Takeover
from recycle_pp.wire.messages.handshake import WorkerHello
from recycle_pp.wire.messages.saving import Assembled, Assembling
from recycle_pp.wire.messages.steps import Measured
from recycle_pp.wire.messages.supervisors import Died, Registration
from recycle_pp.wire.messages.table import Message
from recycle_pp.wire.messages.workers import FROM_WORKER, LASTING, State

from .coordinator import Coordinator
from .failover_discovery import FailoverDiscovery
from .job import new_job
from .ranks import Rank

DISCOVERY_SECONDS = 2.0  # least time for workers that may still try to connect to the lost coordinator


class Successor(Coordinator):
    def __init__(self, *arguments: Any, takeover: Takeover, token: str) -> None:
        super().__init__(*arguments)
        self._takeover = takeover
        self._discovery = FailoverDiscovery(token)

    async def run(self) -> int:
        with suppress(Deposed):
            await self._take_over()
        return await super().run()

    def _receive_from_supervisor(self, number: int, message: Message, peer: Peer) -> None:
        if self._discovery.over.is_set():
            super()._receive_from_supervisor(number, message, peer)
        elif isinstance(message, Registration):
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
                return  # the worker died, or its connection broke
            if not isinstance(state, State):
                return
            self._discovery.worker(hello.rank, hello.incarnation, state, peer)
        await self._discovery.over.wait()
        await super()._handle_worker(peer, hello)

    async def _take_over(self) -> None:
        """Restores the job from the reports; `Job` handles `CoordinatorReplaced` for the protocol."""
        control, parallel = self._settings.control, self._settings.parallel
        saving, planning = self._driver.saving, self._driver.planning
        reading = asyncio.gather(self._recorder.read_history(), planning.load())
        looking = asyncio.create_task(saving.look())
        patience = max(control.suspicion, DISCOVERY_SECONDS)
        await self._discovery.complete(await self._agreement.supervisors(), patience)
        states = self._discovery.states()
        found = find(states)
        committed = max((state.committed for state in states.values()), default=-1)
        lost = not states and await self._agreement.generation() >= 0
        if lost:
            await looking
        elif not states:
            committed = (await saving.whole()).step - 1
        await asyncio.wait({looking}, timeout=READ_SECONDS)
        await reading
        await self.lease.wait()
        ranks = self._discovery.ranks(parallel.pipelines, parallel.stages)
        self._roster.update(ranks)
        steps = self._settings.run.steps
        if saving.newest() == saving.path(steps) and committed < steps - 1:
            self._discovery.over.set()
            self._lifecycle.end(0)  # others have finished the job while this supervisor was suspended
            return
        # Before the first generation all workers start from the same checkpoint. Later workers get state from a peer.
        assignment = {rank.number: rank.role for rank in ranks}
        job = new_job(self._settings, 0 if found.begun else committed + 1, found.generation, committed, assignment)
        self._driver.begin(job)
        self._recorder.took_over(self._takeover, found)
        if lost:
            self.stop(_lost(saving.newest()))
        self._driver.change(planning.problem(job.problem))
        if found.begun:
            self._restarts.taken_over(found.live, found.committed)
            await self._continue_saving(found)
            self._driver.drive(CoordinatorReplaced(found))
        for rank in self._roster:
            rank.last_message = time.monotonic()
            if not self.over:
                self._restore_rank(rank, found)
        self._discovery.over.set()
        repeated = self._discovery.repeated()
        self._handle_again(repeated, (Measured,))
        if found.commit is not None:
            self._recorder.record_missing_commit(found.commit)
        # Assemblies before saved parts; otherwise a checkpoint would be assembled twice.
        self._handle_again(repeated, (Assembling, Assembled))
        self._handle_again(repeated, set(LASTING) - {Measured, Assembling, Assembled})
        # Savers may have died before the newest membership.
        self._driver.send(saving.only(self._driver.job.live))
        self._deaths.respawn_due()

    def _handle_again(self, repeated: Sequence[tuple[int, Message]], kinds: Collection[type[Message]]) -> None:
        for number, message in repeated:
            if type(message) in kinds:
                self._workers.handle(self._roster[number], message)

    def _restore_rank(self, rank: Rank, found: Found) -> None:
        """Records the death of a dead worker, and restarts a live worker that is not a member."""
        for death in rank.causes.values():
            if death.where:
                self._restarts.failed(death.where, rank.role)
        if rank.role in found.live or (rank.alive and not found.begun):
            return
        if rank.incarnation < 0 or (rank.alive and rank.role not in found.members):
            rank.spawn()
        else:
            self._deaths.found(rank, found.begun)

    async def _continue_saving(self, found: Found) -> None:
        """Continues an unfinished checkpoint. Workers repeat their reports about the checkpoint's parts."""
        savers = found.commit.savers if found.commit else []
        done = found.committed + 1
        if not savers or self._settings.emulate.mode:
            return
        if not await self._driver.saving.exists(done):
            self._driver.saving.begin(done, savers, found.commit is not None and found.commit.last, found.informed)


def _lost(newest: Path | None) -> str:
    text = "the coordinator and all workers were lost at once; "
    if newest is not None:
        return text + f"start again with run.resume=true, which continues from checkpoint {newest.name}"
    return text + "there is no checkpoint to continue from"
