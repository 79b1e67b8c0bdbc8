"""Handles the supervisors' connections: registration, deaths of workers, and evictions of machines.

number = supervisors.welcome(peer, hello)       # the supervisor's rank; None if it is rejected or redirected
supervisors.receive(number, message, peer)      # each later message
supervisors.lost(number, peer)                  # the connection ended
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from recycle_pp.config.node_settings import first_difference
from recycle_pp.consensus.process_identity import is_dead
from recycle_pp.consensus.refusal import REFUSED
from recycle_pp.telemetry.events.coordinators import SupervisorBack
from recycle_pp.telemetry.events.workers import Spawned as SpawnedEvent
from recycle_pp.telemetry.words import plural
from recycle_pp.wire.connection import Peer
from recycle_pp.wire.frames import encode
from recycle_pp.wire.messages.agreement import Leader, Place
from recycle_pp.wire.messages.handshake import SupervisorHello
from recycle_pp.wire.messages.health import Health
from recycle_pp.wire.messages.lifecycle import Exit
from recycle_pp.wire.messages.supervisors import (
    Died,
    Dying,
    Evict,
    Finish,
    MachineChecked,
    NoPlace,
    Probed,
    Redirect,
    Registration,
    Spawn,
    Spawned,
    Stacks,
    Stopping,
    SupervisorHeartbeat,
    SupervisorWelcome,
)
from recycle_pp.wire.messages.table import Message

from .deaths import Deaths
from .driver import Driver
from .hang_detector import HangDetector
from .hardware import Hardware
from .operators import Operators
from .ranks import Rank
from .returns import Returns
from .start_checks import StartChecks
from .state import JobState

_LOOK_SECONDS = 0.05  # between two checks for whether a supervisor has reconnected or its process has ended
_TERM_SECONDS = 0.3  # time for a SIGTERM to the whole job to reach all of its nodes


class Supervisors:
    def __init__(
        self,
        state: JobState,
        leader: Leader,
        driver: Driver,
        deaths: Deaths,
        hangs: HangDetector,
        returns: Returns,
        operators: Operators,
        job_id: str,
    ) -> None:
        self._state = state
        self._leader = leader
        self._job_id = job_id
        self._driver = driver
        self._deaths = deaths
        self._returns = returns
        self._checks = StartChecks(state)
        self.hardware = Hardware(state, deaths)
        state.recorder.share(self._send_to_all)
        self._shared: tuple[str, Mapping[str, str]] | None = None  # the first node and its settings
        self._handlers: dict[type[Message], Callable[[Rank, Any], None]] = {
            SupervisorHeartbeat: hangs.supervisor_beats,
            Stacks: lambda rank, message: (operators if message.shown else hangs).stacks(rank, message),
            Spawned: self._spawned,
            Stopping: self._stopping,
            Dying: deaths.dying,
            Died: deaths.reported,
            Probed: returns.probed,
            Health: self.hardware.reported,
            MachineChecked: self._checks.checked,
        }

    def welcome(self, peer: Peer, hello: SupervisorHello) -> int | None:
        number, parallel = hello.rank, self._state.settings.parallel
        places: dict[int, Place] = {}
        if number < 0:
            if not any(self._state.roster):  # no rank is known yet, so this supervisor must ask again
                peer.send(Redirect(self._leader))
                return None
            free = self._state.roster.free(self._state.job.workers.values())
            if free is None:
                peer.send(self._no_place(hello))
                return None
            # Reset what belonged to the lost node: its address, its counts and its stop signal.
            free.supervisor = peer
            free.place = None
            self._state.restarts.replaced(free)
            free.respawns = 0
            free.stopping = False
            free.missed_heartbeats = 0
            number = free.number
            places = {rank: place for rank, place in self._state.roster.places().items() if rank != number}
        elif number >= (world := parallel.pipelines * parallel.stages):
            peer.send(NoPlace(f"rank {number} belongs to another launch: this job has {world} workers"))
            return None
        elif self._is_taken(number, hello):
            peer.send(NoPlace(f"a new node has taken over rank {number}; this node ends"))
            return None
        self._checks.welcomed(number)
        run_dir, quarantined = str(self._state.run.path), self.hardware.quarantined
        peer.send(
            SupervisorWelcome(self._state.settings, run_dir, self._leader, number, self._job_id, places, quarantined)
        )
        if self._state.lifecycle.code is not None:  # the job has stopped before its start
            peer.send(Finish(self._state.lifecycle.code, self._state.lifecycle.reason))
        return number

    def receive(self, number: int, message: Message, peer: Peer) -> None:
        if isinstance(message, Registration):
            self._register(number, message, peer)
        elif number in self._state.roster:  # heartbeats may arrive before the registration
            rank = self._state.roster[number]
            rank.missed_heartbeats = 0
            self._handlers[type(message)](rank, message)

    def lost(self, number: int, peer: Peer) -> None:
        """Handles the end of a connection, which means that the node or its agent is gone. In two cases the supervisor
        has some time to reconnect:

        - The connection was reset, and the node was not leaving.
        - This coordinator was suspended or cut off. Supervisors close connections to a silent coordinator.
        """
        if number in self._state.roster and (rank := self._state.roster[number]).supervisor is peer:
            reset = peer.was_reset and not rank.stopping
            waits = reset or self._state.lease.lapsed(self._state.settings.control.suspicion)
            patience = min(REFUSED, self._state.settings.control.suspicion) if waits else 0.0
            self._await_return(rank, peer, time.monotonic() + patience)

    def _await_return(self, rank: Rank, peer: Peer, until: float) -> None:
        if rank.supervisor is not peer:
            return
        ended = rank.place is not None and is_dead(rank.place.process)
        if time.monotonic() < until and not ended and not self._state.lifecycle.over:
            self._state.timers.after(_LOOK_SECONDS, self._await_return, rank, peer, until)
        else:
            rank.supervisor = None
            if rank.worker is not None:
                rank.worker.send(Exit())  # the supervisor may be unable to end its worker
            self._deaths.node_lost(rank)

    def _register(self, number: int, message: Registration, peer: Peer) -> None:
        """Registers a supervisor, with the state of its worker."""
        rank = self._state.roster.enter(number)
        rank.supervisor = peer
        rank.place = message.place
        rank.missed_heartbeats = 0
        if message.settings is not None and rank.incarnation < 0:
            self._compare(rank, message.settings)
            if message.clock is not None:
                self._checks.registered(rank, message.clock)
        if self._state.lifecycle.code is not None:  # the job has stopped since the welcome
            rank.send(Finish(self._state.lifecycle.code, self._state.lifecycle.reason))
            return
        self._state.recorder.share_with(rank.send)
        if message.spawn is not None:
            self._returned(rank, message.spawn.incarnation, message.deaths)
        elif rank.incarnation >= 0:  # a new node in place of a lost one
            self._returns.newcomer(rank)
        elif self._state.roster.complete:
            # From now on the job survives the loss of this coordinator.
            self._driver.agreement_gate.announce(-1, self._state.roster.places())
            for each in self._state.roster:
                each.spawn()

    def _send_to_all(self, message: Message) -> None:
        frame = encode(message)
        for rank in self._state.roster:
            if rank.supervisor is not None:
                rank.supervisor.send_frame(frame)

    def _is_taken(self, number: int, hello: SupervisorHello) -> bool:
        """Whether another supervisor process is connected as this rank."""
        holder = self._state.roster[number].supervisor if number in self._state.roster else None
        if holder is None or not isinstance(holder.hello, SupervisorHello):
            return False
        return (holder.hello.host, holder.hello.pid) != (hello.host, hello.pid)

    def _no_place(self, hello: SupervisorHello) -> NoPlace:
        hellos = [rank.hello for rank in self._state.roster if rank.hello is not None]
        joined = sum(hello.launcher > 0 and (of.host, of.launcher) == (hello.host, hello.launcher) for of in hellos)
        if not joined:
            return NoPlace(self._why_no_place())
        return NoPlace(
            f"this process ends, because the job had lost only {plural(joined, 'worker')}; start at most {joined} "
            f"(--nproc-per-node={joined})",
            surplus=True,
        )

    def _why_no_place(self) -> str:
        if self._returns.cut:
            return (
                f"no node of the job is lost: {next(iter(self._returns.cut.values()))}, and its workers start once the "
                "network between them works; to replace it with this node, stop its agent"
            )
        return "no node of the job is lost, so another node cannot join"

    def _compare(self, rank: Rank, settings: Mapping[str, str]) -> None:
        """Stops the job if the settings of a node differ from those of the first node."""
        node = f"node {rank.agent} ({rank.host})"
        if self._shared is None:
            self._shared = node, settings
        elif (difference := first_difference(self._shared[1], settings)) is not None:
            key, here, there = difference
            self._state.lifecycle.stop(
                f"the nodes were started with different settings: {key} is {here} on {self._shared[0]}, and {there} on "
                f"{node}; start every node with the same command line",
                code=2,
            )

    def _returned(self, rank: Rank, incarnation: int, deaths: Sequence[Died]) -> None:
        """Handles a reconnected supervisor, whose worker may have been declared dead meanwhile."""
        self._state.recorder.event(SupervisorBack(worker=str(rank.role), rank=rank.number))
        for died in deaths:
            if rank.alive and died.incarnation == rank.incarnation:
                self._deaths.reported(rank, died)
        if rank.alive and incarnation < rank.incarnation:  # the newest `Spawn` was lost with the connection
            rank.send(Spawn(rank.incarnation, rank.role, rank.respawns))
        rank.incarnation = max(rank.incarnation, incarnation)
        if not rank.alive and self._state.restarts.will_return(rank):
            self._returns.reconnected(rank)

    def _spawned(self, rank: Rank, message: Spawned) -> None:
        if self._state.lifecycle.over:  # readers would take a spawn after the end for the start of a resumed run
            return
        self._state.recorder.event(
            SpawnedEvent(worker=str(rank.role), rank=rank.number, pid=message.pid, host=rank.host)
        )

    def _stopping(self, rank: Rank, message: Stopping) -> None:
        rank.stopping = True
        if message.again and self._state.ending.signal is not None:
            self._driver.end_early()
        elif message.signal == "SIGINT":
            self._driver.finish_early("SIGINT", 130)
        else:
            self._state.timers.after(_TERM_SECONDS, self._evict)

    def _evict(self) -> None:
        """Evicts the machines that got SIGTERM, or ends the job if too few workers would remain. If a stage keeps no
        worker, its last worker stays until a checkpoint is saved, from which all others restart."""
        present = [rank for rank in self._state.roster if rank.supervisor is not None]
        going = [rank for rank in present if rank.stopping]
        staying = [rank for rank in present if not rank.stopping and (rank.alive or rank.incarnation < 0)]
        if len(staying) < self._state.settings.parallel.stages:
            self._driver.finish_early("SIGTERM", 143)
            return
        for rank in going:
            rank.send(Evict())
        settings = self._state.settings
        if len({rank.role.stage for rank in staying}) < settings.parallel.stages and not settings.emulate.mode:
            self._state.ending.save_asked = True
            self._end_when_saved(going, self._state.job.committed + 1)

    def _end_when_saved(self, going: Sequence[Rank], step: int) -> None:
        """Ends these workers when there is a checkpoint of more than `step` steps. Otherwise the steps after it would
        be lost, until the supervisors end the workers."""
        left = [rank for rank in going if rank.alive and rank.stopping]
        if self._state.saving.newest_step > step and not self._state.storing.busy:
            for rank in left:
                self._deaths.end(rank, "eviction", "SIGTERM")
        elif left:
            self._state.timers.after(_LOOK_SECONDS, self._end_when_saved, left, step)
