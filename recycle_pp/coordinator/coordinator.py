"""The one place that decides: who is live, what runs, what is agreed. It hosts `protocol.Job` on real connections.

    coordinator = Coordinator(settings, run, events, progress, agreement, leader)
    await coordinator.handle(peer)        # a supervisor or a worker has connected
    code = await coordinator.run()        # 0, or the exit code of a job that had to stop

Two kinds of clients: a supervisor a rank (spawns and watches, decides nothing) and its worker. The coordinator keeps no
state that they could not report again, and nothing here depends on where it runs: `successor.py` takes its place.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from recycle_schedules import Worker

from recycle_pp.config.settings import Settings
from recycle_pp.consensus.agreement import Agreement
from recycle_pp.consensus.agreement_gate import Gate
from recycle_pp.protocol.commit import ProtocolViolation
from recycle_pp.protocol.job import Job, Send, StageLost
from recycle_pp.protocol.liveness import Stuck
from recycle_pp.protocol.partition_resolution import give_up
from recycle_pp.protocol.roles import fill_stages
from recycle_pp.telemetry.events import Events
from recycle_pp.telemetry.progress import Progress
from recycle_pp.telemetry.recorder import Recorder
from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.wire.connection import Peer
from recycle_pp.wire.messages.agreement import Leader
from recycle_pp.wire.messages.handshake import SupervisorHello, WorkerHello
from recycle_pp.wire.messages.supervisors import (
    FROM_SUPERVISOR,
    Died,
    Dying,
    Evict,
    Finish,
    NoPlace,
    Present,
    Redirect,
    Spawned,
    Stacks,
    Stopping,
    SupervisorHeartbeat,
    SupervisorWelcome,
)
from recycle_pp.wire.messages.table import Message, is_void
from recycle_pp.wire.messages.workers import (
    FROM_WORKER,
    Announce,
    Assembled,
    Assembling,
    Broken,
    CannotRun,
    Donate,
    Evaluated,
    Exit,
    Finished,
    Leave,
    Leaving,
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
    Vote,
    WorkerHeartbeat,
    WorkerWelcome,
)

from .checkpoints import CannotRestore, Saving
from .deaths import CAUSE_SECONDS, DYING_SECONDS, Deaths
from .planning import Planning
from .problem import new_job, with_less_memory
from .ranks import NODE_LOSS, Rank
from .restart_policy import RestartPolicy
from .roster import Roster
from .timers import Timers
from .watch import Standing, Watch

_TERM_SECONDS = 0.3  # within which a SIGTERM to the whole job reaches all of it
_BROKEN_SECONDS = 0.5  # a link that broke though nobody died is rebuilt after so long


class Coordinator:
    def __init__(
        self,
        settings: Settings,
        run: RunFolder,
        events: Events,
        progress: Progress,
        agreement: Agreement,
        leader: Leader,
    ) -> None:
        self._settings, self._run, self._agreement, self._leader = settings, run, agreement, leader
        self._roster, self._timers = Roster(settings), Timers()
        self._restarts = RestartPolicy(settings)
        self._gate = Gate(agreement, self._deliver, self.stop, self.give_way)
        self._changed = asyncio.Event()
        self._code: int | None = None
        self.gave_way = False
        self.agents: set[int] = set()  # of the launch, that still live at the end
        self._unreachable: dict[Worker, list[Worker]] = {}  # by who says so, since the last time that it was mended
        self._digests: dict[Worker, dict[str, str]] = {}
        self._saving = Saving(run.checkpoints, settings.parallel.stages)
        self._platform: str | None = None  # of the first worker: see execution.device
        self._job = new_job(settings, self._saving.steps_done() if settings.run.resume else 0)
        self._recorder = Recorder(settings, run, events, progress, self._job)
        self._planning = Planning(settings, run, lambda: self._job, self._drive, self.stop)
        self._deaths = Deaths(self._roster, self._restarts, self._recorder, self._timers, self)
        self._watch = Watch(settings, self._roster, self, run.hangs)
        self._supervisor_handlers: dict[type[Message], Callable[[Rank, Any], None]] = {
            SupervisorHeartbeat: self._watch.supervisor_beats,
            Stacks: self._watch.stacks,
            Spawned: self._spawned,
            Stopping: self._stopping,
            Dying: lambda rank, message: self._deaths.dead(rank, message.incarnation, DYING_SECONDS),
            Died: self._died,
        }
        self._worker_handlers: dict[type[Message], Callable[[Rank, Any], None]] = {
            WorkerHeartbeat: self._beats,
            StoreValue: lambda rank, message: self._roster.publish(message.key, message.value),
            Measured: lambda rank, message: self._recorder.measured(rank.role, message),
            OpProgress: lambda rank, message: self._recorder.progress(rank.role, message),
            Resumed: lambda rank, message: self._recorder.resumed(rank.role, message),
            Broken: self._broken,
            Ready: self._ready,
            CannotRun: lambda rank, message: self.stop(message.reason, code=2),
            Leaving: self._leaving,
            Finished: self._finished,
            Saved: self._saved,
            SaveFailed: self._save_failed,
            Assembling: lambda rank, message: self._saving.assembling(rank.role, message),
            Assembled: self._assembled,
            State: lambda rank, message: None,  # only a successor wants it, see there
            **dict.fromkeys((Report, Vote, Evaluated, Synced), self._receive),
        }
        self._report_damage()
        if self._saving.damaged and not self._job.first_step:
            self.stop(f"run.resume=true: none of the checkpoints in {run.checkpoints} is whole")

    # -- the job's life ----------------------------------------------------------------------------------------

    async def run(self) -> int:
        """Until the job is finished or has to stop."""
        watch = asyncio.create_task(self._watch_workers())
        while self._code is None:
            await self._changed.wait()
            self._changed.clear()
        watch.cancel()
        if self.gave_way:
            return self._code
        self.agents = self._roster.agents()
        self._roster.tell_workers(Exit())
        for rank in self._roster:
            rank.tell(Finish(self._code))
        self._gate.close()
        await self._until_all_have_gone()
        self._recorder.close()
        return self._code

    def stop(self, reason: str, code: int = 1) -> None:
        if self._code is None:
            self._deaths.close()
            self._recorder.stopped(reason)
            self._end(code)

    def give_way(self) -> None:
        """Another supervisor coordinates: what is decided here counts no more, and nobody is told anything."""
        if not self.gave_way:
            self.gave_way = True
            self._gate.close()
            self._timers.close()
            self._recorder.close()
            self._end(1)

    @property
    def over(self) -> bool:
        return self._code is not None

    @property
    def live(self) -> set[Worker]:
        return self._job.live

    @property
    def committed(self) -> int:
        return self._job.committed

    def _end(self, code: int) -> None:
        self._code = code if self._code is None else self._code
        self._changed.set()

    async def _until_all_have_gone(self, seconds: float = 10.0) -> None:
        deadline = time.monotonic() + seconds
        while any(rank.alive for rank in self._roster) and time.monotonic() < deadline:
            await asyncio.sleep(0.01)

    # -- connections -------------------------------------------------------------------------------------------

    async def handle(self, peer: Peer) -> None:
        """A mistake of ours must end the job with its traceback, not look like the death of whoever was speaking."""
        peer.end_after_silence(self._settings.control.suspicion)
        try:
            match peer.hello:
                case SupervisorHello():
                    await self._handle_supervisor(peer, peer.hello)
                case WorkerHello():
                    await self._handle_worker(peer, peer.hello)
        except Exception:
            self.stop(f"the coordinator failed:\n{traceback.format_exc()}")

    async def _handle_supervisor(self, peer: Peer, hello: SupervisorHello) -> None:
        number = hello.rank
        if number < 0:
            if not any(self._roster):  # nobody has come yet: the newcomer is to ask again
                peer.send(Redirect(self._leader))
                return
            free = self._roster.free(self._job.live)
            if free is None:
                peer.send(NoPlace("no node of the job is lost, so there is no place for another one"))
                return
            free.supervisor, free.respawns, number = peer, 0, free.number
        peer.send(SupervisorWelcome(self._settings, str(self._run.path), self._leader, number))
        if self._code is not None:  # it had to stop before anybody came
            peer.send(Finish(self._code))
        async for message in peer.listen(FROM_SUPERVISOR):
            if isinstance(message, Present):
                self._present(number, message, peer)
            else:
                self._obey(number, message, peer)
        self._supervisor_lost(number, peer)

    def _supervisor_lost(self, number: int, peer: Peer) -> None:
        """The node is gone, or its agent: nobody watches the worker."""
        if number in self._roster and (rank := self._roster[number]).supervisor is peer:
            rank.supervisor = None
            if rank.worker is not None:
                rank.worker.send(Exit())  # where it can still hear us, and its supervisor cannot end it
            rank.causes.setdefault(rank.incarnation, NODE_LOSS)
            self._deaths.dead(rank, rank.incarnation)

    def _present(self, number: int, message: Present, peer: Peer) -> None:
        """A supervisor listens, and says what it knows of its worker."""
        rank = self._roster.enter(number)
        rank.supervisor, rank.place, rank.unheard = peer, message.place, 0
        if message.spawn is not None:
            self._returned(rank, message.spawn.incarnation, message.deaths)
        elif rank.incarnation >= 0:  # a newcomer, in the place of a node that was lost
            self._recorder.event("node_joined", rank.role, rank=number, host=rank.host)
            rank.spawn()
        elif self._roster.complete:
            self._gate.announce(-1, self._roster.places())  # from now on the job survives the loss of this coordinator
            for each in self._roster:
                each.spawn()

    def _returned(self, rank: Rank, incarnation: int, deaths: Sequence[Died]) -> None:
        """A supervisor that had lost its connection; where it was missed, its worker has been given up."""
        self._recorder.event("supervisor_back", rank.role, rank=rank.number)
        for died in deaths:
            if rank.alive and died.incarnation == rank.incarnation:
                self._died(rank, died)
        rank.incarnation = max(rank.incarnation, incarnation)
        if not rank.alive and self._restarts.comes_back(rank):
            rank.spawn()

    def _obey(self, number: int, message: Message, peer: Peer) -> None:
        if number in self._roster:  # it may beat while it waits for the welcome
            rank = self._roster[number]
            rank.unheard = 0
            self._supervisor_handlers[type(message)](rank, message)

    def _spawned(self, rank: Rank, message: Spawned) -> None:
        self._recorder.event("spawned", rank.role, rank=rank.number, pid=message.pid, host=rank.host)

    def _stopping(self, rank: Rank, message: Stopping) -> None:
        rank.stopping = True
        if message.signal == "SIGINT":
            self.stop("SIGINT", 130)
        else:
            self._timers.after(_TERM_SECONDS, self._evict)

    def _died(self, rank: Rank, message: Died) -> None:
        seen, death = rank.causes.get(message.incarnation), message.death
        if seen is not None:  # a hang that we have ended ourselves
            death = msgspec.structs.replace(death, cause=seen.cause, detail=seen.detail)
        elif message.asked and message.incarnation == rank.ended:
            death = msgspec.structs.replace(death, detail=f"{death.detail}: its connection had broken")
        rank.causes[message.incarnation] = death
        self._deaths.dead(rank, message.incarnation)
        self._deaths.explain(rank, message.incarnation)

    def _evict(self) -> None:
        """SIGTERM: the end of the job where all have got it, else of those machines, and the others go on."""
        present = [rank for rank in self._roster if rank.supervisor is not None]
        going = [rank for rank in present if rank.stopping]
        if going == present:
            self.stop("SIGTERM", 143)
            return
        for rank in going:
            rank.tell(Evict())

    async def _handle_worker(self, peer: Peer, hello: WorkerHello) -> None:
        if hello.rank not in self._roster:
            return  # nobody has told it to come
        rank, incarnation = self._roster[hello.rank], hello.incarnation
        if incarnation != rank.incarnation or not rank.alive:
            return  # given up before it came: its generation is void
        if hello.moved and rank.worker is not peer:
            return  # it comes from another coordinator, too late: likewise
        rank.worker, rank.heard = peer, time.monotonic()
        if not hello.moved:
            faults = self._restarts.faults_of(rank.role)
            peer.send(WorkerWelcome(self._settings, rank.role, str(self._run.path), self._job.first_step, faults))
        async for message in peer.listen(FROM_WORKER):
            rank.heard = time.monotonic()
            if incarnation == rank.incarnation and rank.alive:
                self._hear(rank, message)
        if not self.over:
            self._deaths.dead(rank, incarnation)

    def _hear(self, rank: Rank, message: Message) -> None:
        if not is_void(message, self._job.generation):
            self._worker_handlers[type(message)](rank, message)

    def _receive(self, rank: Rank, message: Message) -> None:
        self._drive(self._job.receive, rank.role, message)

    def _beats(self, rank: Rank, message: WorkerHeartbeat) -> None:
        self._recorder.heartbeat(rank.role, message)
        self._watch.worker_beats(rank, message)

    def _broken(self, rank: Rank, message: Broken) -> None:
        self._unreachable[rank.role] = message.unreachable
        self._timers.after(_BROKEN_SECONDS, self._mend, message.generation)

    def _ready(self, rank: Rank, message: Ready) -> None:
        self._recorder.ready(rank.role, message)
        self._planning.introduced(rank.role, message)
        if self._fits(rank, message.platform) and rank.role not in self._job.live:
            earliest = 0 if self._job.phase == "starting" else self._restarts.earliest(rank.role)
            self._drive(self._job.ready, rank.role, earliest)

    def _leaving(self, rank: Rank, message: Leaving) -> None:
        if not self.over:
            self._recorder.event("evicted", rank.role)
            self._drive(self._job.leave, rank.role)

    def _finished(self, rank: Rank, message: Finished) -> None:
        self._digests[rank.role] = message.digests
        self._receive(rank, message)

    def _saved(self, rank: Rank, message: Saved) -> None:
        self._send(self._saving.saved(rank.role, message))

    def _save_failed(self, rank: Rank | None, message: SaveFailed) -> None:
        if self._saving.save_failed(message):
            self._recorder.event("checkpoint_failed", None, checkpoint=message.step, detail=message.detail)
        self._finish_if_done()

    def _assembled(self, rank: Rank, message: Assembled) -> None:
        self._saving.assembled(message)
        self._recorder.event("checkpoint_saved", None, checkpoint=message.step)
        self._finish_if_done()

    def _fits(self, rank: Rank, platform: str) -> bool:
        """Peers must compute the same bits, so all workers have the platform of the first. At the start another one
        stops the job; who comes later is sent away."""
        self._platform = self._platform or platform
        if platform == self._platform:
            return True
        if self._job.phase == "starting":
            self.stop(f"all workers must run on the same: {rank.role} has {platform}, not {self._platform}", code=2)
        else:
            self._recorder.event("refused", rank.role, platform=platform, expected=self._platform)
            self._restarts.earliest(rank.role)  # it need not come again
            rank.worker.send(Leave())  # type: ignore[union-attr]  # it has just spoken
        return False

    # -- the protocol ------------------------------------------------------------------------------------------

    def _drive(self, event: Any, *arguments: Any) -> None:
        """One event into the job, its messages out; afterwards the recorder reads the job's notes."""
        if self.over:
            return
        self._job.saving = self._saving.busy
        try:
            out = event(*arguments)
        except StageLost as lost:
            self._recorder.event("stage_lost", None, stage=lost.stage)
            self._timers.after(CAUSE_SECONDS, self._restore, lost.stage)  # who has died by itself can be started again
            return
        except ProtocolViolation as violation:
            self.stop(str(violation))
            return
        self._send(out)
        if self._job.phase == "holding":
            suspicion = self._settings.control.suspicion
            self._timers.after(suspicion, self._hold_no_longer, self._job, self._job.committed)
        notes = self._recorder.read_notes()
        self._send(self._job.follow_up())
        self._planning.look()
        for note in notes:
            if note["event"] == "committed":
                self._deaths.respawn_due()
                commit = note["commit"]
                for worker, factor in self._planning.measured(self._recorder.spans(commit.step)):
                    self._recorder.speed_changed(worker, factor)
                if note["skipped"]:
                    self._recorder.event("checkpoint_skipped", None, checkpoint=commit.step + 1, by=self._saving.slow())
                if commit.savers and not self._settings.emulate.mode:
                    self._saving.begin(commit.step + 1, commit.savers, note["last"])
                    if note["last"]:
                        self._timers.after(self._settings.control.lease, self._save_no_longer, commit.step + 1)
        self._finish_if_done()

    def _save_no_longer(self, step: int) -> None:
        """A file system that does not answer holds up the next checkpoints, and must not hold up the end."""
        slow, seconds = self._saving.slow(), self._settings.control.lease
        if self._saving.busy:
            self._save_failed(None, SaveFailed(step, f"{slow} did not get it onto the disk in {seconds:g} s"))

    def _finish_if_done(self) -> None:
        if self._job.phase == "finished" and not self._saving.busy and not self.over:
            self._deaths.close()
            self._recorder.finished(self._digests)
            self._end(int(self._saving.failed))

    def _send(self, out: list[Send]) -> None:
        if not out:  # as after most votes: nothing here may cost a look at every worker then
            return
        # Not always first: whoever takes over tells a commit to those that have missed it, and then the generation.
        announced = next((message for _, message in out if isinstance(message, Announce)), None)
        if announced is not None:
            self._gate.announce(announced.generation, self._roster.places())
        self._gate.send(out)

    def _deliver(self, out: Sequence[Send]) -> None:
        self._roster.deliver([self._addressed(send) for send in out])

    def _addressed(self, send: Send) -> Send:
        """A donation says where the joiner takes the state."""
        if not isinstance(donation := send.message, Donate):
            return send
        self._recorder.event("joining", donation.to, donor=str(send.to))
        return Send(send.to, msgspec.structs.replace(donation, address=self._recorder.address(donation.to)))

    # -- deaths and returns ------------------------------------------------------------------------------------

    def _restore(self, stage: int) -> None:
        """A stage has lost its last worker: fill it with others, and let everybody begin at the newest checkpoint."""
        present = [rank for rank in self._roster if rank.alive]
        stages = self._settings.parallel.stages
        try:
            step = self._saving.restore_point(self._job.started, len(present), stages)
        except CannotRestore as cannot:
            self.stop(
                f"stage {stage} has no live worker left, {cannot}. Start the run again with enough workers and "
                f"run.dir={self._run.path} run.resume=true: it goes on after step {cannot.step}"
            )
            return
        finally:
            self._report_damage()
        roles = fill_stages({r.number: r.role for r in self._roster}, [r.number for r in present], stages)
        for number, role in roles.items():
            self._roster[number].role = role
        self._saving.abandon()
        self._job = new_job(self._settings, step, self._job.generation, [rank.role for rank in present])
        self._recorder.restored(self._job)
        for rank in present:
            rank.spawn()

    def _report_damage(self) -> None:
        for step, damage in self._saving.damaged.items():
            self._recorder.event("checkpoint_damaged", None, checkpoint=step, detail=damage)

    def go_on_without(self, worker: Worker) -> None:
        self._drive(self._job.died, worker)
        self._send(self._saving.died(worker, self._job.live))

    def spare_memory(self, worker: Worker) -> None:
        self._job.replan(with_less_memory(self._job.problem, worker))

    # -- the watch ---------------------------------------------------------------------------------------------

    async def _watch_workers(self) -> None:
        try:
            await self._watch.run()
        except Exception:
            self.stop(f"the coordinator failed:\n{traceback.format_exc()}")

    def standing(self) -> Standing:
        job = self._job
        works = self._planning.busy or self._gate.busy or job.phase not in ("reporting", "running")
        return Standing(job.committed + 1, job.generation, frozenset(job.live), frozenset(job.unanswered), works)

    def profiled(self, worker: Worker, kind: str) -> float | None:
        return self._planning.profiled(worker, kind)

    def hung(self, rank: Rank, stuck: Stuck) -> None:
        self._recorder.event("hang_suspected", rank.role, where=stuck.where, seconds=stuck.seconds)
        self._deaths.end_stuck(rank, stuck)

    def renew(self, waiting: list[Worker]) -> None:
        self._recorder.event("renewed", None, waiting=[str(worker) for worker in waiting])
        self._drive(self._job.regroup)

    def _mend(self, generation: int) -> None:
        """A link broke and still nobody has died: the same members build their links anew, or, where that was tried in
        vain, without those whom others cannot reach."""
        if generation != self._job.generation:
            return
        complaints = {w: others for w, others in self._unreachable.items() if w in self._job.live}
        self._unreachable.clear()
        lost = give_up(complaints)
        for rank in self._roster:
            if rank.role in lost and rank.alive:
                self._deaths.end(rank, "node_loss", "the network between it and other workers is broken")
        if not lost:
            self._drive(self._job.regroup)

    def _hold_no_longer(self, job: Job, committed: int) -> None:
        """A joiner for which the others hold has its donor or its network lost, and nobody saw it."""
        if job is self._job and committed == job.committed:
            self._drive(job.wait_no_longer)
