"""Detects workers without progress (`protocol.liveness`) and silent supervisors.

hangs = HangDetector(settings, roster, coordinator, run.hangs)
hangs.supervisor_beats(rank, message)     # a heartbeat with the vital signs of the worker
hangs.worker_beats(rank, message)         # a heartbeat that shows whether the awaited message has arrived
hangs.stacks(rank, message)               # the stacks of a stuck worker, before it is killed
await hangs.run()                         # never returns

The coordinator gets the verdicts. A stuck worker is killed, and counts as dead from that moment on. If all workers wait
and none works, all links are rebuilt. The run folder gets the reasons: `hangs/step-000020.json` has the activity of
each worker and the graph of waits, `hangs/step-000020-1.2.txt` the stacks of all threads of worker 1.2.

While the disks of all readers of training data do not answer, no reader is killed. Every DISK_SECONDS the coordinator
gets the waiting workers, the file and the seconds that they have waited.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from recycle_schedules import Worker

from recycle_pp.config.settings import Settings
from recycle_pp.consensus.leader_lease import LeaderLease
from recycle_pp.protocol.liveness import Patience, Sign, Stuck, Verdict, judge
from recycle_pp.telemetry.background import Later, now
from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.telemetry.warn import warn_once
from recycle_pp.wire.messages.activity import Activity
from recycle_pp.wire.messages.lifecycle import WorkerHeartbeat
from recycle_pp.wire.messages.supervisors import CoordinatorHeartbeat, Signs, Stacks, SupervisorHeartbeat

from .ranks import Rank
from .roster import Roster

DISK_SECONDS = 10.0  # between two reports that the job waits for its training data
RENEWALS = 3  # number of times that links are rebuilt in one step before the job stops


class Watched(Protocol):
    """The part of the coordinator that the hang detector uses."""

    def standing(self) -> Standing: ...
    def hung(self, rank: Rank, stuck: Stuck) -> None: ...
    def renew(self, waiting: list[Worker]) -> None: ...
    def awaits_data(self, workers: list[Worker], path: str, seconds: float) -> None: ...
    def stop(self, reason: str, code: int = 1) -> None: ...
    def profiled(self, worker: Worker, kind: str) -> float | None: ...
    def message_seconds(self, a: Worker, b: Worker) -> float: ...


@dataclass(frozen=True)
class Standing:
    """The state of the job. works: whether the coordinator itself works, so that workers may wait for it."""

    step: int
    generation: int
    members: frozenset[Worker]
    unanswered: frozenset[Worker]
    works: bool


@dataclass
class _Known:
    """The last heartbeats of a worker process and of its supervisor. Times are those of time.monotonic()."""

    signs: Signs
    came: float  # arrival of `signs`
    delivered: tuple[int, float] = (-1, 0.0)  # serial number of a wait whose data has arrived, and time of that report
    path: str = ""  # file of training data that the worker reads; "" if none
    read_since: float | None = None  # start of the worker's oldest unfinished read


class HangDetector:
    def __init__(
        self,
        settings: Settings,
        roster: Roster,
        watched: Watched,
        folder: Path,
        later: Later = now,
        lease: LeaderLease | None = None,
    ) -> None:
        """
        later  runs functions that write to the folder
        lease  no worker is judged unless a majority has confirmed this lease recently
        """
        self._lease = lease
        control = settings.control
        self._beat = control.heartbeat
        self._patience = Patience(control.suspicion, control.lease)
        self._roster = roster
        self._watched = watched
        self._folder = folder
        self._later = later
        self._known: dict[int, _Known] = {}
        self._generation = -1  # newest generation
        self._begun = 0.0  # time when the newest generation was first seen
        self._judged = -math.inf  # time of the last judgement
        self._not_before = -math.inf  # time of the last judgement before the newest generation
        self._renewed = (-1, 0)  # step, number of renewals in this step
        self._disks_silent = -math.inf  # last time at which none of the readers' disks answered
        self._awaited_data = math.inf  # time of the next report that the job waits for training data
        self._deadlocked: float | None = None  # start of a suspected deadlock
        self._reports: tuple[int, list[Any]] = (-1, [])  # step, reports of that step

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

    def start_in_words(self, rank: Rank) -> str:
        """The activity of this rank's worker during the start of the job."""
        known = self._known.get(rank.number)
        if known is None or known.signs.incarnation != rank.incarnation:
            return Activity().at_start()
        return known.signs.activity.at_start()

    def stacks(self, rank: Rank, message: Stacks) -> None:
        step, _ = self._reports
        self._later(self._write, f"{_name(step)}-{rank.role}.txt", message.text)

    async def run(self) -> None:
        before = time.monotonic()
        while True:
            await asyncio.sleep(self._beat)
            if self._lease is not None:
                await self._lease.fresh()
            now = time.monotonic()
            slept = max(0.0, now - before - self._beat)
            before = now
            self._skip(slept)
            for rank in self._roster:
                rank.send(CoordinatorHeartbeat())
                rank.missed_heartbeats += 1
                rank.last_message += slept
                if rank.supervisor is not None and rank.missed_heartbeats * self._beat > self._patience.suspicion:
                    rank.supervisor.abort()  # then the node counts as lost, with its worker
            self._judge(now)

    def _skip(self, slept: float) -> None:
        """If this process was suspended, for instance by swapping, does not count that time as silence of others."""
        self._begun += slept
        if slept < self._patience.suspicion / 2:  # a late tick
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
        self._awaited_data += slept
        self._disks_silent += slept

    def _judge(self, now: float) -> None:
        standing = self._watched.standing()
        if standing.generation != self._generation:
            self._generation = standing.generation
            self._begun = now
            self._not_before = self._judged
            self._deadlocked = None
        self._judged = now
        present = {rank.role: rank for rank in self._roster if rank.alive and rank.supervisor is not None}
        signs = {worker: self._sign(rank, standing, now) for worker, rank in present.items()}
        verdict = judge(signs, self._patience, standing.works)
        if verdict.no_disk:
            self._disks_silent = now
        self._report_data(signs, verdict.no_disk, now)
        if not verdict.deadlock:
            self._deadlocked = None
        elif self._deadlocked is None:
            self._deadlocked = now
        deadlock = verdict.deadlock if self._confirmed(present.values(), standing.members) else []
        if not verdict.stuck and not deadlock:
            return
        self._report(standing, signs, verdict)
        for worker, stuck in verdict.stuck.items():
            self._watched.hung(present[worker], stuck)
        if deadlock:
            self._renew(standing, deadlock)

    def _confirmed(self, present: Collection[Rank], members: Collection[Worker]) -> bool:
        """Whether all workers and supervisors have sent heartbeats since the deadlock was suspected.

        Heartbeats of different moments may look like a deadlock: one worker still seems to wait for a vote after the
        others have continued. The members themselves must have sent heartbeats, because the supervisor of a stopped
        worker can only report that the worker waits.
        """
        since = self._deadlocked
        if since is None:
            return False
        signs = (self._known.get(rank.number) for rank in present)
        recent = (rank.last_message > since for rank in present if rank.role in members)
        return all(known is None or known.came > since for known in signs) and all(recent)

    def _sign(self, rank: Rank, standing: Standing, now: float) -> Sign:
        silent, since = now - rank.last_message, now - self._begun
        unanswered = since if rank.role in standing.unanswered else None
        member = rank.role in standing.members
        known = self._known.get(rank.number)
        if known is None or known.signs.incarnation != rank.incarnation:
            return Sign(Activity(), silent, silent, None, silent, unanswered, member=member)
        (number, at), signs = known.delivered, known.signs
        activity = signs.activity
        delivered = None
        if activity.kind == "waits" and number == signs.number:
            delivered = now - at
        elif activity.kind == "waits" and activity.what != "orders" and signs.seconds > now - self._not_before:
            delivered = since  # the wait began in an old generation and should have ended with it
        seconds = signs.seconds
        if activity.kind == "waits":  # a joiner may have waited long before this generation
            seconds = min(seconds, since)
        elif activity.what == "data":  # after an outage of all disks, they may recover at different times
            seconds = min(seconds, now - self._disks_silent)
        return Sign(
            activity,
            seconds,
            signs.quiet,
            delivered,
            silent,
            unanswered,
            self._expected(rank.role, activity),
            member,
            None if not known.path else 0.0 if known.read_since is None else now - known.read_since,
        )

    def _expected(self, worker: Worker, activity: Activity) -> float | None:
        """Expected seconds of the worker's op, or of the message that it waits for; None if unknown."""
        if activity.kind == "waits" and activity.peer is not None:
            return self._watched.message_seconds(worker, Worker(*activity.peer))
        return self._watched.profiled(worker, activity.what)

    def _report_data(self, signs: dict[Worker, Sign], readers: list[Worker], now: float) -> None:
        """Reports workers that wait for training data. readers: all readers if none of their disks answers, else
        none."""
        waiting = [w for w in readers if signs[w].activity.what == "data"]
        if not waiting:
            self._awaited_data = math.inf
            return
        oldest = max(waiting, key=lambda w: signs[w].reading or 0.0)
        seconds = signs[oldest].reading or 0.0
        if self._awaited_data == math.inf:
            self._awaited_data = now - seconds + DISK_SECONDS
        if now >= self._awaited_data:
            self._awaited_data += DISK_SECONDS
            path = next(
                known.path for rank in self._roster if rank.role == oldest and (known := self._known.get(rank.number))
            )
            self._watched.awaits_data(sorted(waiting), path, seconds)

    def _renew(self, standing: Standing, waiting: list[Worker]) -> None:
        step, times = self._renewed
        self._renewed = standing.step, times + 1 if step == standing.step else 1
        if self._renewed[1] > RENEWALS:
            report = self._folder / f"{_name(standing.step)}.json"
            self._watched.stop(
                f"all workers wait in step {standing.step} and none works, even after the links were renewed "
                f"{RENEWALS} times; {report} shows what each worker waits for"
            )
            return
        self._watched.renew(waiting)

    # -- the run folder ----------------------------------------------------------------------------------------

    def _report(self, standing: Standing, signs: dict[Worker, Sign], verdict: Verdict) -> None:
        """Adds a report to the file of this step."""
        step, reports = self._reports
        reports = reports if step == standing.step else []
        reports.append({
            "time": time.time(),
            "generation": standing.generation,
            "stuck": {
                str(w): {**stuck._asdict(), "stacks": f"{_name(standing.step)}-{w}.txt"}
                for w, stuck in verdict.stuck.items()
            },
            "deadlock": [str(w) for w in verdict.deadlock],
            "workers": {str(w): sign.to_json() for w, sign in sorted(signs.items())},
            "waits": [[str(a), str(b)] for a, b in verdict.graph.edges],
        })  # fmt: skip
        self._reports = standing.step, reports
        self._later(self._write, f"{_name(standing.step)}.json", json.dumps(reports, indent=1) + "\n")

    def _write(self, name: str, text: str) -> None:
        try:
            self._folder.mkdir(exist_ok=True)
            RunFolder.write_text(self._folder / name, text)
        except OSError as error:
            warn_once(f"{self._folder} cannot be written: {error.strerror}")


def _name(step: int) -> str:
    return f"step-{step:06d}"
