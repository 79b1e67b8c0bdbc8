"""Detects workers without progress (`protocol.hangs`) and silent supervisors.

hangs = HangDetector(state, driver, planning, deaths)
hangs.supervisor_beats(rank, message)     # a heartbeat with the vital signs of the worker
hangs.worker_beats(rank, message)         # the worker's own heartbeat; shows whether the message it waits for is there
hangs.stacks(rank, message)               # the stacks of a stuck worker, before it is killed
await hangs.run()                         # never returns

A stuck worker is killed and counts as dead at once. If all workers wait and none works, all links are rebuilt. Files
in the run folder explain why: `hangs/step-000020.json` contains the activity of each worker and the wait-for graph,
and `hangs/step-000020-1.2.txt` contains the stacks of all threads of worker 1.2. During a long step,
`hangs/now.json` contains the current activities and graph, for `recycle_pp.doctor`.

If no disk with training data answers, no worker that reads the data is killed. Instead, an event every DATA_SECONDS
names the waiting workers, the file, and the seconds waited.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Collection
from dataclasses import dataclass

from recycle_schedules import Worker

from recycle_pp.protocol.events import LinksBroken
from recycle_pp.protocol.hangs import Patience, Sign, judge
from recycle_pp.telemetry.events.job import DATA_SECONDS, WaitsForData
from recycle_pp.telemetry.events.recovery import Renewed
from recycle_pp.wire.messages.activity import Activity
from recycle_pp.wire.messages.lifecycle import WorkerHeartbeat
from recycle_pp.wire.messages.supervisors import CoordinatorHeartbeat, Signs, Stacks, SupervisorHeartbeat

from .deaths import Deaths
from .driver import Driver
from .hang_reports import HangReports
from .planning import Planning
from .ranks import Rank
from .state import JobState

TRANSFERS = ("tensor", "sum", "copy")  # waits that make progress while bytes arrive
RENEWALS = 3  # maximum number of times that links are rebuilt in one step; after that the job stops


@dataclass
class _Known:
    """The last heartbeats of a worker process and of its supervisor. Times are values of time.monotonic()."""

    signs: Signs
    came: float  # arrival of `signs`
    # (serial number of the newest wait whose message has arrived, time when the worker reported that)
    delivered: tuple[int, float] = (-1, 0.0)
    path: str = ""  # file of training data that the worker reads; "" if none
    read_since: float | None = None  # start of the worker's oldest unfinished read
    lacks: tuple[int, ...] = ()  # if the worker waits for a sum: members whose messages have not arrived
    received: int | None = None  # bytes from its peers, see `WorkerHeartbeat`
    progressed: float = -math.inf  # time when `received` last changed


class HangDetector:
    def __init__(self, state: JobState, driver: Driver, planning: Planning, deaths: Deaths) -> None:
        self._state = state
        self._driver = driver
        self._planning = planning
        self._deaths = deaths
        control = state.settings.control
        self._beat = control.heartbeat
        self._patience = Patience(control.suspicion, control.lease)
        self._known: dict[int, _Known] = {}
        self._generation = -1  # newest generation
        self._begun = 0.0  # time when the newest generation was first seen
        self._judged = -math.inf  # time of the last judgement
        self._not_before = -math.inf  # time of the last judgement before the newest generation
        self._renewed = (-1, 0)  # step, number of renewals in this step
        self._disks_silent = -math.inf  # last time at which none of the readers' disks answered
        self._awaited_data = math.inf  # due time of the next event about training data; inf if none
        self._deadlocked: float | None = None  # start of a suspected deadlock
        self._reports = HangReports(state)

    def supervisor_beats(self, rank: Rank, message: SupervisorHeartbeat) -> None:
        if message.signs is not None and message.signs.incarnation == rank.incarnation:
            known = self._known.get(rank.number)
            if known is None or known.signs.incarnation != rank.incarnation:
                self._known[rank.number] = _Known(message.signs, time.monotonic())
            else:
                known.signs = message.signs
                known.came = time.monotonic()

    def worker_beats(self, rank: Rank, message: WorkerHeartbeat) -> None:
        known = self._known.get(rank.number)
        number = message.delivered
        now = time.monotonic()
        if known is None:
            return
        if number is not None and known.delivered[0] != number:
            known.delivered = number, now
        reading = message.reading
        known.path = reading.path if reading else ""
        known.read_since = now - reading.seconds if reading and reading.seconds else None
        known.lacks = tuple(message.lacks)
        if known.received != message.received:
            known.received, known.progressed = message.received, now

    def start_in_words(self, rank: Rank) -> str:
        """The activity of this rank's worker during the start of the job."""
        known = self._known.get(rank.number)
        if known is None or known.signs.incarnation != rank.incarnation:
            return Activity().at_start()
        return known.signs.activity.at_start()

    def stacks(self, rank: Rank, message: Stacks) -> None:
        self._reports.stacks(rank.role, message.text)

    async def run(self) -> None:
        before = time.monotonic()
        while True:
            await asyncio.sleep(self._beat)
            await self._state.lease.fresh()  # after a suspension of this process, others may only appear to be silent
            now = time.monotonic()
            slept = max(0.0, now - before - self._beat)
            before = now
            self._skip(slept)
            for rank in self._state.roster:
                rank.send(CoordinatorHeartbeat())
                rank.missed_heartbeats += 1
                rank.last_message += slept
                if rank.supervisor is not None and rank.missed_heartbeats * self._beat > self._patience.suspicion:
                    rank.supervisor.abort()  # then the node counts as lost, with its worker
            self._judge(now)

    def _skip(self, slept: float) -> None:
        """Excludes time in which this process was suspended, for instance by swapping, from the silence of others."""
        self._begun += slept
        if slept < self._patience.suspicion / 2:  # not suspended; the loop was only late
            return
        self._judged += slept
        self._not_before += slept
        if self._deadlocked is not None:
            self._deadlocked += slept
        for known in self._known.values():
            number, at = known.delivered
            known.came += slept
            known.delivered = (number, at + slept)
            if known.read_since is not None:
                known.read_since += slept
            known.progressed += slept
        self._awaited_data += slept
        self._disks_silent += slept

    def _judge(self, now: float) -> None:
        job = self._state.job
        step = job.committed + 1
        if job.generation != self._generation:
            self._generation = job.generation
            self._begun = now
            self._not_before = self._judged
            self._deadlocked = None
        self._judged = now
        present = {rank.role: rank for rank in self._state.roster if rank.alive and rank.supervisor is not None}
        unanswered = job.unanswered
        signs = {worker: self._sign(rank, rank.number in unanswered, now) for worker, rank in present.items()}
        # While the coordinator itself works, workers may wait for it.
        works = self._planning.busy or self._driver.agreement_gate.busy or job.phase not in ("reporting", "running")
        works = works or job.waits_for_round
        verdict = judge(signs, self._patience, works)
        if verdict.no_disk:
            self._disks_silent = now
        self._report_data(signs, verdict.no_disk, now)
        self._reports.note(step, signs, verdict)
        if not verdict.deadlock:
            self._deadlocked = None
        elif self._deadlocked is None:
            self._deadlocked = now
        deadlock = verdict.deadlock if self._confirmed(present.values()) else []
        if not verdict.stuck and not deadlock:
            return
        self._reports.add(step, signs, verdict)
        for worker, stuck in verdict.stuck.items():
            self._deaths.end_stuck(present[worker], stuck)
        if deadlock:
            self._renew(step, deadlock)

    def _confirmed(self, present: Collection[Rank]) -> bool:
        """Whether all workers and supervisors have sent heartbeats since the deadlock was suspected.

        Heartbeats sent at different times can look like a deadlock: one worker may still seem to wait for a vote when
        the others have continued. The members' own heartbeats are needed too, because the supervisor of a stopped
        worker can only report that the worker waits.
        """
        since = self._deadlocked
        if since is None:
            return False
        signs = (self._known.get(rank.number) for rank in present)
        recent = (rank.last_message > since for rank in present if rank.number in self._state.job.live)
        return all(known is None or known.came > since for known in signs) and all(recent)

    def _sign(self, rank: Rank, unanswered: bool, now: float) -> Sign:
        """The vital signs of a rank's worker. unanswered: whether the worker's report for this generation is still
        missing."""
        silent, since = now - rank.last_message, now - self._begun
        waits = since if unanswered else None
        member = rank.number in self._state.job.live
        known = self._known.get(rank.number)
        if known is None or known.signs.incarnation != rank.incarnation:
            return Sign(Activity(), silent, silent, None, silent, waits, member=member)
        (number, at), signs = known.delivered, known.signs
        activity = signs.activity
        delivered = None
        if activity.kind == "waits" and number == signs.number:
            delivered = now - at
        elif activity.kind == "waits" and activity.what != "orders" and signs.seconds > now - self._not_before:
            delivered = since  # the wait began in an old generation and should have ended with it
        seconds = signs.seconds
        if activity.kind == "waits":  # count from this generation, because a joiner may have begun to wait long before
            seconds = min(seconds, since, now - known.progressed if activity.what in TRANSFERS else math.inf)
        elif activity.what == "data":  # after an outage of all disks, count only the time since the first one recovered
            seconds = min(seconds, now - self._disks_silent)
        return Sign(
            activity,
            seconds,
            signs.quiet,
            delivered,
            silent,
            waits,
            self._expected(rank.role, activity),
            member,
            None if not known.path else 0.0 if known.read_since is None else now - known.read_since,
            known.path,
            signs.delayed,
            tuple(self._state.roster[member].role for member in known.lacks if member in self._state.roster),
            signs.suspended,
        )

    def _expected(self, worker: Worker, activity: Activity) -> float | None:
        """Expected seconds of the worker's op, or of the message that it waits for; None if unknown."""
        if activity.kind == "waits" and activity.peer is not None:
            job = self._state.job
            return job.problem_now().graph.between(worker, Worker(*activity.peer)) if job.phase == "running" else 0.0
        if activity.what == "sum":
            return self._state.profile.sum_seconds(worker)
        return self._state.profile.seconds(worker, activity.what)

    def _report_data(self, signs: dict[Worker, Sign], readers: list[Worker], now: float) -> None:
        """Records the workers that wait for training data, every DATA_SECONDS.

        readers: all readers if none of their disks answers; else empty
        """
        waiting = [w for w in readers if signs[w].activity.what == "data"]
        if not waiting:
            self._awaited_data = math.inf
            return
        oldest = max(waiting, key=lambda w: signs[w].reading or 0.0)
        seconds = signs[oldest].reading or 0.0
        if self._awaited_data == math.inf:
            self._awaited_data = now - seconds + DATA_SECONDS
        if now >= self._awaited_data:
            self._awaited_data += DATA_SECONDS
            path = next(
                known.path
                for rank in self._state.roster
                if rank.role == oldest and (known := self._known.get(rank.number))
            )
            names = [str(worker) for worker in sorted(waiting)]
            self._state.recorder.event(WaitsForData(path=path, waiting=names, seconds=round(seconds, 1)))

    def _renew(self, step: int, waiting: list[Worker]) -> None:
        before, times = self._renewed
        self._renewed = step, times + 1 if before == step else 1
        if self._renewed[1] > RENEWALS:
            self._state.lifecycle.stop(
                f"all workers wait in step {step} and none runs an op, although all links were rebuilt "
                f"{RENEWALS} times; {self._reports.path(step)} shows what each worker waits for"
            )
            return
        self._state.recorder.event(Renewed(waiting=[str(worker) for worker in waiting]))
        self._driver.drive(LinksBroken())
