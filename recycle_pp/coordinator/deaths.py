"""Handles the death of a worker, from its first report to the restart. The job continues before the cause is known.

deaths = Deaths(state, driver, after_commit)  # a handler of the job's events
deaths.dying(rank, message)                   # the supervisor saw the process end; the cause is unknown
deaths.reported(rank, message)                # the supervisor has reaped the process and knows the cause
deaths.disconnected(rank, incarnation)        # the worker's connection broke
deaths.node_lost(rank)                        # the supervisor's connection broke
deaths.end(rank, cause, detail)               # kills a live worker, for instance because its link is cut
deaths.end_stuck(rank, stuck)                 # kills a worker that makes no progress

1. `_count_as_dead` handles the first report of a death. The other workers continue in a new generation.
2. The job reports `stage_lost` if a stage has no live worker, or if a part of its state has no copy left. Then all
   workers restart from the newest checkpoint or, if there is none, from step 0, some of them in different roles.
3. `_explain` records the event of the death, once the cause is known or the wait for it has timed out.
   `restart_policy.py` then decides whether to restart the worker. A worker with a `+rejoin_at` fault restarts at the
   next commit instead.
"""

from __future__ import annotations

import asyncio
import time

import msgspec
from recycle_schedules import Worker

from recycle_pp.fitting.problem import with_less_memory
from recycle_pp.protocol.events import Event, Outcome, ProblemChanged, Restarted, WorkerDied
from recycle_pp.protocol.hangs import Stuck
from recycle_pp.state.late_upload import upload_late
from recycle_pp.storage.store import StoreError
from recycle_pp.telemetry.background import in_thread
from recycle_pp.telemetry.events.deaths import HangSuspected, cause_in_words
from recycle_pp.telemetry.events.recovery import StageLost
from recycle_pp.telemetry.events.workers import Respawned
from recycle_pp.telemetry.recorder import UNKNOWN
from recycle_pp.telemetry.words import plural
from recycle_pp.wire.messages.supervisors import Death, Died, Dying

from .after_commit import AfterCommit
from .checkpoints import NOTHING, Whole
from .driver import Driver
from .ranks import NODE_LOSS, Rank
from .state import JobState

UNEXPLAINED_SECONDS = 3.0  # limit on how long an unknown cause of death delays later events
# Limits on the wait for the cause of a death. The supervisor may report it after the worker's connection breaks.
CAUSE_SECONDS = 0.3
HUNG_SECONDS = 3.0  # for a stuck worker, whose stacks are written before it is killed
DYING_SECONDS = 60.0  # for a process that has not ended yet; the kernel or a GPU driver may take long to clean up
ASSEMBLY_SECONDS = 0.1  # between two looks at a checkpoint that is being assembled when a stage is lost


class Deaths:
    def __init__(self, state: JobState, driver: Driver, after_commit: AfterCommit) -> None:
        self._state = state
        self._driver = driver
        self._after_commit = after_commit
        self._newest: dict[int, Death] = {}  # newest death, by stage
        self._restoring: asyncio.Task[None] | None = None

    def handled(self, event: Event, outcome: Outcome) -> None:
        for note in outcome.notes:
            match note["event"]:
                case "committed":
                    self.respawn_due()
                case "took_over":
                    worker, role = note["worker"], note["role"]
                    self._state.restarts.recast({worker: role, role: worker})
                case "untrusted":
                    self._end_untrusted(self._state.roster[note["member"]], note["detail"])
                case "stage_lost":
                    self._state.recorder.event(StageLost(stage=note["stage"], detail=note["what"]))
                    # During the delay, workers that failed by themselves are restarted, so that they can take part.
                    self._state.timers.after(CAUSE_SECONDS, self._restart, note["stage"], note["detail"])

    # -- reports -----------------------------------------------------------------------------------------------

    def dying(self, rank: Rank, message: Dying) -> None:
        """Handles the end of a process, seen by its supervisor. The cause is not known yet."""
        self._count_as_dead(rank, message.incarnation, DYING_SECONDS)

    def reported(self, rank: Rank, message: Died) -> None:
        """Handles a death whose cause is known, because the supervisor has reaped the process."""
        seen = rank.causes.get(message.incarnation)
        death = message.death
        if seen is not None:  # this coordinator had the worker killed, so it knows the cause
            death = msgspec.structs.replace(death, cause=seen.cause, detail=seen.detail)
        elif message.asked and message.incarnation == rank.ended:
            death = msgspec.structs.replace(death, detail=f"{death.detail}, because its connection broke")
        rank.causes[message.incarnation] = death
        self._count_as_dead(rank, message.incarnation)
        self._explain(rank, message.incarnation)

    def disconnected(self, rank: Rank, incarnation: int) -> None:
        self._count_as_dead(rank, incarnation)

    def node_lost(self, rank: Rank) -> None:
        """Handles the end of a supervisor's connection. The rank's worker counts as dead, because its node or its
        supervisor is gone."""
        rank.causes.setdefault(rank.incarnation, NODE_LOSS)
        self._count_as_dead(rank, rank.incarnation)

    def end(self, rank: Rank, cause: str, detail: str) -> None:
        rank.causes[rank.incarnation] = Death(cause, detail)
        rank.kill()
        self._count_as_dead(rank, rank.incarnation)

    def end_stuck(self, rank: Rank, stuck: Stuck) -> None:
        """Orders the supervisor to report the worker's stacks and then to kill the worker. Waits for neither."""
        self._state.recorder.event(HangSuspected(worker=str(rank.role), where=stuck.where, seconds=stuck.seconds))
        rank.causes[rank.incarnation] = Death("hang", f"{stuck.where}, for {stuck.seconds:.1f} s")
        rank.kill(stacks=True)
        self._count_as_dead(rank, rank.incarnation, HUNG_SECONDS, stuck.seconds)

    def _end_untrusted(self, rank: Rank, detail: str) -> None:
        """Kills a worker with wrong state. The job already continues without it."""
        if rank.alive:
            self.end(rank, "mismatch", detail)

    def found_after_failover(self, rank: Rank, begun: bool) -> None:
        """Records a worker that a new coordinator found dead or unreachable.

        begun: whether any generation was agreed. If so, the restored job no longer counts the worker as live
        """
        if rank.alive:
            rank.causes.setdefault(rank.incarnation, Death("hang", "the reconnection to the new coordinator"))
            rank.kill()
        rank.alive = False
        rank.worker = None
        rank.died, rank.died_as = rank.incarnation, rank.role
        self._state.recorder.found_dead(rank.role, (rank.number, rank.incarnation), time.monotonic())
        self._limit_wait(rank)
        if not begun:
            self._driver.drive(WorkerDied(rank.number))
        self._explain(rank, rank.incarnation)

    # -- the job continues -------------------------------------------------------------------------------------

    def _count_as_dead(
        self, rank: Rank, incarnation: int, cause_seconds: float = CAUSE_SECONDS, stuck: float | None = None
    ) -> None:
        """Continues the job without the worker. Ignores later reports of the same death.

        cause_seconds  time to wait for the cause
        stuck          seconds without progress, if the worker was killed for that
        """
        if incarnation != rank.incarnation or not rank.alive:
            return
        now = time.monotonic()
        rank.alive = False
        rank.worker = None
        rank.died, rank.died_as = incarnation, rank.role
        if self._state.lifecycle.over:
            return
        self._state.recorder.death(rank.role, (rank.number, incarnation), now, stuck)
        self._limit_wait(rank)
        self._state.restarts.died(rank.role, self._state.job.committed)
        self._driver.drive(WorkerDied(rank.number))
        self._after_commit.died(rank)
        rank.cancel_wait = self._state.timers.after(cause_seconds, self._explain, rank, incarnation)

    def _limit_wait(self, rank: Rank) -> None:
        """Limits how long the event of this death, and all later events, wait for the cause."""
        self._state.timers.after(UNEXPLAINED_SECONDS, self._write_unexplained, rank, rank.incarnation)

    def _write_unexplained(self, rank: Rank, incarnation: int) -> None:
        self._state.recorder.suppose_death((rank.number, incarnation), rank.causes.get(incarnation, UNKNOWN))

    # -- a stage is lost ---------------------------------------------------------------------------------------

    def _restart(self, stage: int, why: str) -> None:
        self._restoring = asyncio.create_task(self._state.lifecycle.guard(self._read_checkpoints, stage, why))

    async def _read_checkpoints(self, stage: int, why: str) -> None:
        saving = self._state.saving
        deadline = time.monotonic() + self._state.settings.control.lease
        while saving.assembles and time.monotonic() < deadline:  # it will be the newest one, and may replace the others
            await asyncio.sleep(ASSEMBLY_SECONDS)
        whole, unread = NOTHING, ""
        try:
            whole = await saving.whole()
        except ValueError as error:
            unread = str(error)
        await self._bring_to_store(whole.step)
        await self._state.lease.wait()
        self._restore(stage, why, whole, unread)

    async def _bring_to_store(self, step: int) -> None:
        """Uploads the checkpoint of `step` steps if the store may lack it, because the loss interrupted its upload. The
        disks of other nodes may not have it."""
        saving, settings = self._state.saving, self._state.settings.checkpoint
        if settings.store is None or step <= saving.stored_step:
            return
        if len({rank.node for rank in self._state.roster if rank.alive}) < 2:
            return
        try:
            await in_thread(upload_late, settings.store, saving.path(step), settings)
            saving.stored(step)
        except StoreError as error:  # nodes that share the folder do not need the store
            self._state.recorder.say(f"checkpoint {saving.path(step).name} is not in the store: {error}")

    def _restore(self, stage: int, why: str, whole: Whole, unread: str) -> None:
        """Restarts all workers from the newest intact checkpoint, at least one in each stage, or stops the job.

        unread: why no checkpoint could be read, in words; "" if it is known which ones there are

        Workers whose machine got SIGTERM end instead, because their supervisors start no process any more. But if too
        few workers would remain, they count as present.

        Without a checkpoint all restart from step 0. This cannot repeat for ever: each loss of a stage includes a
        death, and `run.respawns` limits the restarts of each worker.
        """
        state = self._state
        if state.lifecycle.over:
            return
        if state.ending.signal is not None:
            self._driver.end_early()
            return
        present = [rank for rank in state.roster if rank.alive]
        stages = state.settings.parallel.stages
        if len(present) < stages:
            if any(rank.died > rank.explained for rank in state.roster):  # such a worker may be restarted
                state.timers.after(CAUSE_SECONDS, self._restore, stage, why, whole, unread)
                return
            self._after_commit.report_damage(whole.damaged)
            why += f", and {plural(len(present), 'live worker')} cannot run {plural(stages, 'stage')}"
            self._stop_after_loss(stage, why, whole.step)
            return
        self._after_commit.report_damage(whole.damaged)
        if not whole.step and (reason := unread or self._no_beginning(whole)):
            self._stop_after_loss(stage, f"{why}, and {reason}", whole.step)
            return
        staying = [rank for rank in present if not rank.stopping]
        if len(staying) >= stages:
            for rank in present:
                if rank.stopping:
                    self.end(rank, "eviction", "SIGTERM")
            present = staying
        state.saving.restarted()
        state.storing.restored(whole.step)
        state.spans.clear()
        state.digests.clear()
        before = dict(state.job.assignment)
        self._driver.drive(Restarted(whole.step, [rank.number for rank in present]))
        state.restarts.recast({role: state.job.assignment[member] for member, role in before.items()})
        for rank in present:
            rank.spawn()

    def _no_beginning(self, whole: Whole) -> str:
        """Why the job must not restart from step 0, in words; "" if it may."""
        state = self._state
        if state.saving.newest_step or whole.damaged:
            return ": ".join(["no checkpoint could be read", *whole.damaged.values()][:2])
        if state.settings.islands.store and state.job.started:
            return "there is no checkpoint; an island that has taken part cannot begin again at step 0"
        return ""

    def _stop_after_loss(self, stage: int, why: str, step: int) -> None:
        """Stops the job because a lost stage cannot be restored. step: see `Whole.step`"""
        death = self._newest.get(stage)
        if death is not None and death.mistake:
            self._stop_by_mistake(death)
            return
        again = f" and run.dir={self._state.run.path} run.resume=true: it continues with step {step}" if step else ""
        last = f". The last death in stage {stage}: {cause_in_words(death)}" if death else ""
        self._state.lifecycle.stop(f"{why}. Start the run again with enough workers{again}{last}")

    # -- cause and restart -------------------------------------------------------------------------------------

    def _explain(self, rank: Rank, incarnation: int) -> None:
        """Completes the event of the death, then restarts the worker, leaves it dead, or stops the job. Acts once per
        death."""
        if incarnation != rank.died or rank.explained >= incarnation or self._state.lifecycle.over:
            return
        if incarnation not in rank.causes and rank.supervisor is not None and rank.ended < incarnation:
            # The supervisor saw no death, so only the worker's connection broke. Kill the worker to restart it.
            rank.ended = incarnation
            rank.kill()
            rank.cancel_wait = self._state.timers.after(DYING_SECONDS, self._explain, rank, incarnation)
            return
        rank.explained = incarnation
        rank.cancel_wait()
        rank.causes = {of: why for of, why in rank.causes.items() if of >= incarnation}
        role = rank.died_as
        assert role is not None  # a process of this rank has died
        death = self._newest[role.stage] = rank.causes.get(incarnation, Death("node_loss", "its connection broke"))
        self._state.recorder.explain_death((rank.number, incarnation), death)
        job = self._state.job
        if death.mistake and (job.committed < job.first_step or self._state.restarts.has_failed(death.where)):
            self._stop_by_mistake(death)
            return
        if death.where and not self._takes_less(role, death):
            first = self._state.restarts.failed(death.where, role)
            if first is not None:
                self._state.lifecycle.stop(
                    f"workers {first} and {role} both failed in {death.where}:\n{death.detail.rstrip()}"
                )
                return
        if death.cause == "out_of_memory":
            self._driver.drive(ProblemChanged(with_less_memory(job.problem, role, job.in_flight(role))))
        if self._state.restarts.is_respawned(rank, death):
            rank.respawns += 1
            self._state.recorder.event(Respawned(worker=str(rank.role), respawns=rank.respawns))
            rank.spawn()
        elif self._state.restarts.is_given_up(rank, death):
            self._state.recorder.given_up((rank.number, incarnation), rank.respawns)

    def _stop_by_mistake(self, death: Death) -> None:
        """Stops the job because of an exception in the model's own code. Called if it occurs in the first step, twice
        in the same op, or on the last worker of a stage."""
        where = f" in {death.where}" if death.where else ""
        self._state.lifecycle.stop(
            f"the user's code failed{where}: {death.mistake}; the traceback is in {self._state.run.logs}", code=2
        )

    def _takes_less(self, role: Worker, death: Death) -> bool:
        """Whether the worker ran out of memory in an op, and its limit on micro-batches in flight can be lowered. If
        so, the same failure on a second worker must not stop the job."""
        in_op = death.cause == "out_of_memory" and not death.where.startswith("the start")
        return in_op and self._state.job.in_flight(role) > 1

    def respawn_due(self) -> None:
        """Starts dead workers that have a `+rejoin_at` fault. They take part again from the step that it names."""
        for rank in self._state.roster:
            if self._state.restarts.is_due(rank.role) and not rank.alive and rank.incarnation >= 0 and rank.supervisor:
                rank.spawn()
