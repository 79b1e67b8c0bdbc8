"""The one place that decides: who is live, what runs, what is agreed. It hosts `protocol.Job` on real connections.

    coordinator = Coordinator(settings, run, events, progress, agreement, leader)
    await coordinator.handle(peer)        # a supervisor or a worker has connected
    code = await coordinator.run()        # 0, or the exit code of a job that had to stop

Two kinds of clients: a supervisor a rank (spawns and watches, decides nothing) and its worker. The coordinator keeps no
state that they could not report again, and nothing here depends on where it runs: `successor.py` takes its place.
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from recycle_schedules import Worker, actions, plan

from ..protocol.commit import ProtocolViolation
from ..protocol.job import Job, Send, StageLost
from ..protocol.roles import fill_stages
from ..protocol.unlinked import give_up
from ..settings import Settings
from ..telemetry.events import Events
from ..telemetry.progress import Progress
from ..telemetry.recorder import Recorder
from ..telemetry.run_folder import RunFolder
from .agreement import Agreement, Leader, Place
from .gate import Gate
from .messages import Message, Peer
from .problem import initial_problem, with_less_memory
from .ranks import NODE_LOSS, Rank
from .returns import Returns
from .saving import CannotRestore, Saving

_log = logging.getLogger(__name__)
_TERM_SECONDS = 0.3  # within which a SIGTERM to the whole job reaches all of it
_CAUSE_SECONDS = 0.3  # a death may be seen before its supervisor can say why: the event waits so long for the cause
_DYING_SECONDS = 60.0  # the same where its supervisor will say: when the kernel, or a GPU's driver, has cleaned up
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
        self._ranks: dict[int, Rank] = {}
        self._returns = Returns(settings)
        self._lease = settings.control.lease
        self._gate = Gate(agreement, self._deliver, self.stop)
        self._changed = asyncio.Event()
        self._code: int | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._unreachable: dict[Worker, list[Worker]] = {}  # by who says so, since the last time that it was mended
        self._digests: dict[Worker, dict[str, str]] = {}
        self._saving = Saving(run.checkpoints, settings.parallel.stages)
        self._platform: str | None = None  # of the first worker: see execution.device
        self._job = self._new_job(self._saving.steps_done() if settings.run.resume else 0)
        self._recorder = Recorder(settings, run, events, progress, self._job)
        self._report_damage()
        if self._saving.damaged and not self._job.first_step:
            self.stop(f"run.resume=true: none of the checkpoints in {run.checkpoints} is whole")

    def _new_job(self, first_step: int, generation: int = -1, waiting: Iterable[Worker] = ()) -> Job:
        s = self._settings
        return Job(
            initial_problem(s),
            steps=s.run.steps,
            planner=plan,
            derive=actions,
            clip=s.optimizer.clip,
            stagger=s.optimizer.stagger,
            first_step=first_step,
            evaluate_every=s.run.validate_every,
            evaluate_microbatches=min(s.run.validate_microbatches, s.parallel.microbatches),
            save_every=s.checkpoint.every,
            generation=generation,
            waiting=set(waiting),
        )

    # -- the job's life ----------------------------------------------------------------------------------------

    async def run(self) -> int:
        """Until the job is finished or has to stop."""
        watch = asyncio.create_task(self._watch())
        while self._code is None:
            await self._changed.wait()
            self._changed.clear()
        watch.cancel()
        for rank in self._ranks.values():
            if rank.worker is not None:
                rank.worker.send({"type": "exit"})
            rank.tell({"type": "finish", "code": self._code})
        self._gate.close()
        await self._until_all_have_gone()
        self._recorder.close()
        return self._code

    def stop(self, reason: str, code: int = 1) -> None:
        if self._code is None:
            self._recorder.stopped(reason)
            self._end(code)

    def _end(self, code: int) -> None:
        self._code = code if self._code is None else self._code
        self._changed.set()

    async def _until_all_have_gone(self, seconds: float = 10.0) -> None:
        deadline = time.monotonic() + seconds
        while any(r.alive for r in self._ranks.values()) and time.monotonic() < deadline:
            await asyncio.sleep(0.01)

    # -- connections -------------------------------------------------------------------------------------------

    async def handle(self, peer: Peer) -> None:
        """A mistake of ours must end the job with its traceback, not look like the death of whoever was speaking."""
        peer.end_after_silence(self._settings.control.suspicion)
        try:
            if peer.hello["role"] == "supervisor":
                await self._handle_supervisor(peer)
            else:
                await self._handle_worker(peer)
        except Exception:
            self.stop(f"the coordinator failed:\n{traceback.format_exc()}")

    async def _handle_supervisor(self, peer: Peer) -> None:
        number = int(peer.hello["rank"])
        if number < 0 and not self._ranks:  # nobody has come yet: the newcomer is to ask again
            peer.send({"type": "redirect", "leader": self._leader})
            return
        if number < 0 and (number := self._free_rank(peer)) < 0:
            peer.send({"type": "refused", "reason": "no node of the job is lost, so there is no place for another one"})
            return
        peer.send({
            "type": "welcome",
            "settings": asdict(self._settings),
            "run_dir": str(self._run.path),
            "leader": self._leader,
            "rank": number,
            "now": time.monotonic(),
        })  # fmt: skip
        if self._code is not None:  # it had to stop before anybody came
            peer.send({"type": "finish", "code": self._code})
        async for message in peer:
            if message["type"] == "present":
                self._present(number, message, peer)
            elif message["type"] != "heartbeat" or number in self._ranks:  # it may beat while it waits for the welcome
                self._obey(number, message, peer)
        self._supervisor_lost(number, peer)

    def _supervisor_lost(self, number: int, peer: Peer) -> None:
        """The node is gone, or its agent: nobody watches the worker."""
        rank = self._ranks.get(number)
        if rank is not None and rank.supervisor is peer:
            rank.supervisor = None
            rank.causes.setdefault(rank.incarnation, NODE_LOSS)
            self._dead(number, rank.incarnation)

    def _free_rank(self, peer: Peer) -> int:
        """For a newcomer: of the ranks whose node is lost, one of a stage with the fewest live workers; -1: none."""
        live = Counter(worker.stage for worker in self._job.live)
        free = [rank for rank in self._ranks.values() if rank.supervisor is None and rank.incarnation >= 0]
        if not free:
            return -1
        rank = min(free, key=lambda rank: (live[rank.role.stage], rank.number))
        rank.supervisor, rank.respawns = peer, 0
        return rank.number

    def _present(self, number: int, message: Message, peer: Peer) -> None:
        """A supervisor listens, and says what it knows of its worker."""
        stages = self._settings.parallel.stages
        everybody = self._settings.parallel.pipelines * stages
        rank = self._ranks.setdefault(number, Rank(number, Worker(*divmod(number, stages))))
        rank.supervisor, rank.place, rank.unheard = peer, tuple(message["place"]), 0
        if message["spawn"] is not None:
            self._returned(rank, message, peer)
        elif rank.incarnation >= 0:  # a newcomer, in the place of a node that was lost
            self._recorder.event("node_joined", rank.role, rank=number, host=peer.hello.get("host"))
            rank.spawn(self._lease)
        elif len(self._ranks) == everybody:
            self._gate.announce(-1, self._places())  # from now on the job survives the loss of this coordinator
            for each in sorted(self._ranks):
                self._ranks[each].spawn(self._lease)

    def _returned(self, rank: Rank, message: Message, peer: Peer) -> None:
        """A supervisor that had lost its connection; where it was missed, its worker has been given up."""
        self._recorder.event("supervisor_back", rank.role, rank=rank.number)
        for death in message["deaths"]:
            if rank.alive and death["incarnation"] == rank.incarnation:
                self._obey(rank.number, {"type": "died", **death}, peer)
        rank.incarnation = max(rank.incarnation, message["spawn"]["incarnation"])
        if not rank.alive and self._returns.comes_back(rank):
            rank.spawn(self._lease)

    def _obey(self, number: int, message: Message, peer: Peer) -> None:
        rank = self._ranks[number]
        rank.unheard = 0
        if message["type"] == "spawned":
            pid, host = message["pid"], peer.hello.get("host")
            self._recorder.event("spawned", rank.role, rank=number, pid=pid, host=host)
        elif message["type"] == "stopping":
            rank.stopping = True
            if message["signal"] == "SIGINT":
                self.stop("SIGINT", 130)
            else:
                self._later(_TERM_SECONDS, self._evict)
        elif message["type"] == "dying":
            self._dead(number, message["incarnation"], _DYING_SECONDS)
        elif message["type"] == "died":
            seen = rank.causes.get(message["incarnation"], {})  # a hang that we have ended ourselves
            rank.causes[message["incarnation"]] = {**message, **seen}
            self._dead(number, message["incarnation"])
            self._explain(number, message["incarnation"])

    def _evict(self) -> None:
        """SIGTERM: the end of the job where all have got it, else of those machines, and the others go on."""
        present = [rank for rank in self._ranks.values() if rank.supervisor is not None]
        going = [rank for rank in present if rank.stopping]
        if going == present:
            self.stop("SIGTERM", 143)
            return
        for rank in going:
            rank.tell({"type": "evict"})

    async def _handle_worker(self, peer: Peer) -> None:
        number, incarnation = int(peer.hello["rank"]), int(peer.hello["incarnation"])
        rank = self._ranks[number]
        if incarnation != rank.incarnation or not rank.alive:
            return  # given up before it came: its generation is void
        if peer.hello["moved"] and rank.worker is not peer:
            return  # it comes from another coordinator, too late: likewise
        rank.worker, rank.heard = peer, time.monotonic()
        if not peer.hello["moved"]:
            peer.send({
                "type": "welcome",
                "settings": asdict(self._settings),
                "worker": list(rank.role),
                "run_dir": str(self._run.path),
                "resume": self._job.first_step,
                "faults": [list(f) for f in self._returns.faults_of(rank.role)],
                "now": time.monotonic(),
            })  # fmt: skip
        async for message in peer:
            rank.heard = time.monotonic()
            if incarnation == rank.incarnation and rank.alive:
                self._hear(number, rank, message)
        if self._code is None:
            self._dead(number, incarnation)

    def _hear(self, number: int, rank: Rank, message: Message) -> None:
        kind = message["type"]
        if kind == "heartbeat":
            self._recorder.heartbeat(rank.role, message)
            return
        if kind == "store":
            for other in self._ranks.values():
                if other.worker is not None and other is not rank:
                    other.worker.send(message)
            return
        if kind == "broken":
            self._unreachable[rank.role] = [Worker(*w) for w in message.get("unreachable", ())]
            self._later(_BROKEN_SECONDS, self._mend, message["generation"])
            return
        self._recorder.hear(rank.role, message)
        if kind == "ready":
            rank.patience = self._settings.control.suspicion
            if self._fits(rank, message["platform"]) and rank.role not in self._job.live:
                earliest = 0 if self._job.phase == "starting" else self._returns.earliest(rank.role)
                self._drive(self._job.ready, rank.role, earliest)
        elif kind == "leaving" and self._code is None:
            self._recorder.event("evicted", rank.role)
            self._drive(self._job.leave, rank.role)
        elif kind == "saved":
            self._send(self._saving.saved(rank.role, message))
        elif kind == "refused":  # it cannot do what is asked of the whole job
            self.stop(message["reason"], code=2)
        elif kind == "save_failed":
            if self._saving.could_not_save(message["step"]):
                self._recorder.event("checkpoint_failed", None, checkpoint=message["step"], detail=message["detail"])
            self._finish_if_done()
        elif kind == "assembling":
            self._saving.assembling(rank.role, message)
        elif kind == "assembled":
            self._saving.assembled(message)
            self._recorder.event("checkpoint_saved", None, checkpoint=message["step"])
            self._finish_if_done()
        else:
            if kind == "finished":
                self._digests[rank.role] = message["digests"]
            self._drive(self._job.receive, rank.role, message)

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
            self._returns.earliest(rank.role)  # it need not come again
            rank.worker.send({"type": "leave"})  # type: ignore[union-attr]  # it has just spoken
        return False

    # -- the protocol ------------------------------------------------------------------------------------------

    def _drive(self, event: Any, *arguments: Any) -> None:
        """One event into the job, its messages out; afterwards the recorder reads the job's notes."""
        if self._code is not None:
            return
        try:
            out = event(*arguments)
        except StageLost as lost:
            self._recorder.event("stage_lost", None, stage=lost.stage)
            self._later(_CAUSE_SECONDS, self._restore, lost.stage)  # who has died by itself can be started again
            return
        except ProtocolViolation as violation:
            self.stop(str(violation))
            return
        self._send(out)
        if self._job.phase == "holding":
            self._later(self._settings.control.suspicion, self._hold_no_longer, self._job, self._job.committed)
        notes = self._recorder.read_notes()
        self._send(self._job.follow_up())
        for note in notes:
            if note["event"] == "committed":
                self._respawn_due()
                self._replan()
                if note["savers"] and not self._settings.emulate.mode:
                    self._saving.begin(note["step"] + 1, [Worker(*w) for w in note["savers"]], note["last"])
        self._finish_if_done()

    def _finish_if_done(self) -> None:
        if self._job.phase == "finished" and not self._saving.busy and self._code is None:
            self._recorder.finished(self._digests)
            self._end(int(self._saving.failed))

    def _send(self, out: list[Send]) -> None:
        for _, message in out[:1]:
            if message["type"] == "announce":
                self._gate.announce(message["generation"], self._places())
        self._gate.send(out)

    def _places(self) -> dict[int, Place]:
        """Of the supervisors that are there."""
        return {number: rank.place for number, rank in self._ranks.items() if rank.supervisor and rank.place}

    def _deliver(self, send: Send) -> None:
        to, message = send
        if message["type"] == "donate":
            joiner = Worker(*message["to"])
            message = message | {"address": self._recorder.address(joiner)}
            self._recorder.event("joining", joiner, donor=str(to))
        for rank in self._ranks.values():
            if rank.role == to and rank.worker is not None:
                rank.worker.send(message)

    def _replan(self) -> None:
        """The profile is complete, or it has changed: plan with it from now on."""
        problem = self._recorder.profiled_problem(self._job.problem)
        if problem != self._job.problem:
            self._job.replan(problem)

    # -- deaths and returns ------------------------------------------------------------------------------------

    def _restore(self, stage: int) -> None:
        """A stage has lost its last worker: fill it with others, and let everybody begin at the newest checkpoint."""
        present = [n for n, r in self._ranks.items() if r.alive]
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
        roles = fill_stages({n: r.role for n, r in self._ranks.items()}, present, stages)
        for number, role in roles.items():
            self._ranks[number].role = role
        self._saving.abandon()
        self._job = self._new_job(step, self._job.generation, [roles[n] for n in present])
        self._recorder.restored(self._job)
        for number in present:
            self._ranks[number].spawn(self._lease)

    def _report_damage(self) -> None:
        for step, damage in self._saving.damaged.items():
            self._recorder.event("checkpoint_damaged", None, checkpoint=step, detail=damage)

    def _dead(self, number: int, incarnation: int, cause_seconds: float = _CAUSE_SECONDS) -> None:
        """A worker is dead, whoever saw it first: its own connection, its supervisor, or the watch."""
        rank = self._ranks[number]
        if incarnation != rank.incarnation or not rank.alive:
            return
        now = time.monotonic()
        rank.alive, rank.worker, rank.died = False, None, incarnation
        if self._code is not None:
            return
        self._recorder.death(rank.role, now)
        self._returns.died(rank.role, self._job.committed)
        self._drive(self._job.died, rank.role)
        self._send(self._saving.died(rank.role, self._job.live))
        self._later(cause_seconds, self._explain, number, incarnation)

    def _explain(self, number: int, incarnation: int) -> None:
        """The event of a death, with its cause; and what follows from the cause. Once a death."""
        rank = self._ranks[number]
        if incarnation != rank.died or rank.explained >= incarnation or self._code is not None:
            return
        rank.explained = incarnation
        cause = rank.causes.get(incarnation, {"cause": "node_loss", "detail": "its connection broke"})
        self._recorder.explain_death(rank.role, cause)
        if where := cause.get("where"):
            first = self._returns.failed(where, rank.role)
            if first is not None:
                self.stop(f"workers {first} and {rank.role} both failed in {where}:\n{cause['detail']}")
        if cause["cause"] == "out_of_memory":
            self._job.replan(with_less_memory(self._job.problem, rank.role))
        if self._returns.is_respawned(rank, cause):
            rank.respawns += 1
            self._recorder.event("respawned", rank.role, respawns=rank.respawns)
            rank.spawn(self._lease)
        elif self._returns.is_given_up(rank, cause):
            self._recorder.event("given_up", rank.role, respawns=rank.respawns)

    def _respawn_due(self) -> None:
        """A worker that is to rejoin is started when it is dead, and waits for its step."""
        for rank in self._ranks.values():
            if self._returns.is_due(rank.role) and not rank.alive and rank.incarnation >= 0 and rank.supervisor:
                rank.spawn(self._lease)

    async def _watch(self) -> None:
        """Heartbeats: a worker that gives no sign of life is killed, and dies like any other; a supervisor that gives
        none is cut off, as its node may be: then it counts as lost with its worker."""
        control = self._settings.control
        before = time.monotonic()
        while True:
            await asyncio.sleep(control.heartbeat)
            now = time.monotonic()
            # Whoever slept itself (a closed laptop, a machine that swaps) has no right to call the others silent.
            slept, before = max(0.0, now - before - control.heartbeat), now
            for number, rank in self._ranks.items():
                rank.tell({"type": "heartbeat"})
                rank.unheard += 1
                if rank.supervisor is not None and rank.unheard * control.heartbeat > control.suspicion:
                    rank.supervisor.abort()
                    continue
                rank.heard += slept
                if rank.alive and now - rank.heard > rank.patience:
                    rank.causes[rank.incarnation] = {"cause": "hang", "detail": f"silent for {now - rank.heard:.1f} s"}
                    self._recorder.event("hang_suspected", rank.role)
                    rank.kill()
                    self._dead(number, rank.incarnation)

    def _mend(self, generation: int) -> None:
        """A link broke and still nobody has died: the same members build their links anew, or, where that was tried in
        vain, without those whom others cannot reach."""
        if generation != self._job.generation:
            return
        complaints = {w: others for w, others in self._unreachable.items() if w in self._job.live}
        self._unreachable.clear()
        lost = give_up(complaints)
        for number, rank in self._ranks.items():
            if rank.role in lost and rank.alive:
                detail = "the network between it and other workers is broken"
                rank.causes[rank.incarnation] = {"cause": "node_loss", "detail": detail}
                rank.kill()
                self._dead(number, rank.incarnation)
        if not lost:
            self._drive(self._job.regroup)

    def _hold_no_longer(self, job: Job, committed: int) -> None:
        """A joiner for which the others hold has its donor or its network lost, and nobody saw it."""
        if job is self._job and committed == job.committed:
            self._drive(job.wait_no_longer)

    def _later(self, seconds: float, function: Any, *arguments: Any) -> None:
        async def wait() -> None:
            await asyncio.sleep(seconds)
            function(*arguments)

        task = asyncio.get_running_loop().create_task(wait())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
