"""Coordinator's CPU cost of a step and of a death, by job size, in one process without network and workers.

    python bench/coordinator.py                      # 3x4x6 to 64x16x128 (1024 workers)
    python bench/coordinator.py --sizes 128x32x128

First all votes of a step arrive at once. Then a worker dies in the middle of a step with the planner's own schedule.
The bench prints milliseconds, as the minimum of three runs:

    vote        decode the votes and the records before them, and decide
    log         record the step afterwards
    announce    send the new generation to every worker
    hear        decode all reports
    adopt       find and plan the rest of the step, and write every worker's list of actions
    follow      do the same for later steps, in a thread, while training continues
    MB          total size of the messages of adopt and follow

The results are also in bench/out/coordinator.json. `bench/loop.py` measures the coordinator in its event loop, with a
large run folder.
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from recycle_schedules import Plan, Problem, Worker, actions, plan
from recycle_schedules.compiled import load
from recycle_schedules.op_kinds import KINDS, SPLIT, O

from recycle_pp.config.settings import Parallel, Settings
from recycle_pp.protocol.ballot import make_vote
from recycle_pp.protocol.events import MessageReceived, PlanMade, Send, WorkerDescribed, WorkerDied, WorkerReady
from recycle_pp.protocol.holdings import Holdings
from recycle_pp.protocol.job import Job
from recycle_pp.protocol.participant import Participant
from recycle_pp.telemetry.event_log import EventLog
from recycle_pp.telemetry.progress import Progress
from recycle_pp.telemetry.recorder import Recorder
from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.timing.packing import pack
from recycle_pp.timing.span_tables import SpanTables
from recycle_pp.wire.frames import encode
from recycle_pp.wire.messages.generations import Adopt, Announce, Report, SteadyPlan
from recycle_pp.wire.messages.steps import Measured, Vote
from recycle_pp.wire.messages.table import Message
from recycle_pp.wire.messages.units import UnitId
from recycle_pp.wire.messages.workers import FROM_WORKER

SIZES = ["3x4x6", "6x8x32", "16x8x64", "64x16x128"]
LAYERS, UNITS = 10, 40  # layers per stage, units per layer; a unit has a million elements
PHASES = ("vote", "log", "announce", "hear", "adopt", "follow")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="DxPxM", help="pipelines, stages, micro-batches")
    parser.add_argument("--deaths", type=int, default=3, help="number of deaths; the minimum is printed (default 3)")
    arguments = parser.parse_args()
    load()
    print(f"{'job':>10} {'workers':>7}", *(f"{name:>9}" for name in PHASES), f"{'MB':>6}")
    rows = []
    for size in arguments.sizes:
        D, P, M = map(int, size.split("x"))
        found = [one_step(D, P, M) | one_death(D, P, M, at=0.5 + 0.1 * k) for k in range(arguments.deaths)]
        row = {"job": size} | {key: min(each[key] for each in found) for key in found[0]}
        rows.append(row)
        times = " ".join(f"{1e3 * row[name]:9.1f}" for name in PHASES)
        print(f"{size:>10} {D * P:7} {times} {row['megabytes']:6.2f}", flush=True)
    from results import save  # not at the top, because a test imports this file when bench/ is not in sys.path

    save("coordinator.json", rows)
    return 0


def one_step(pipelines: int, stages: int, microbatches: int) -> dict[str, float]:
    """Seconds from the arrival of all votes to the commit of a normal step, and seconds to record the step
    afterwards."""
    job, _ = under_way(pipelines, stages, microbatches)
    settings = Settings(parallel=Parallel(pipelines=pipelines, stages=stages, microbatches=microbatches))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        run = RunFolder(Path(folder))
        progress = Progress(1, 1, io.StringIO())
        tables = SpanTables()
        recorder = Recorder(settings, run, EventLog(run.events, 1), progress, job, tables)
        for step in range(settings.schedule.profile_steps + 2):
            frames = [
                (member, worker, encode(measured(worker, step, job.problem)), encode(vote(worker, step, job)))
                for member, worker in job.workers.items()
            ]
            begin = time.perf_counter()
            for member, worker, first, second in frames:
                spans: Any = FROM_WORKER.decode(first[4:])
                tables.add(worker, spans)
                recorder.measured(worker, spans)
                last: Any = FROM_WORKER.decode(second[4:])
                event = MessageReceived(member, last)
                outcome = job.handle(event)
                agreed = time.perf_counter()
                recorder.handled(event, outcome)
            assert job.committed == step
            end = time.perf_counter()
        recorder.close()
    return {"vote": agreed - begin, "log": end - agreed}


def measured(worker: Worker, step: int, problem: Problem) -> Measured:
    """The report of a worker that has run its pipeline's micro-batches, with one second per op."""
    done = [(kind, worker.pipeline, i) for i in range(problem.counts[worker.pipeline]) for kind in SPLIT]
    spans = [[*op, float(at), at + 1.0] for at, op in enumerate(done)]
    return Measured(step, pack(spans), samples=[], logged_bytes=0, lr=1e-4, cpu=float(step))


def vote(worker: Worker, step: int, job: Job) -> Vote:
    total = job.problem.total
    return make_vote(0, step, [0.1] * 60, True, True, [1.0] * total, [2.0] * total, speaks=worker.pipeline == 0)


def under_way(pipelines: int, stages: int, microbatches: int) -> tuple[Job, dict[int, Participant]]:
    """A running job, whose workers have all received the plan of its steps."""
    problem = Problem(
        pipelines=pipelines, stages=stages, microbatches=microbatches, durations=dict.fromkeys("FIWO", 1.0)
    )
    job = Job(problem, steps=10, planner=plan, derive=actions)
    members = {m: Participant(m, w, Holdings(m, units(w.stage), -1)) for m, w in job.assignment.items()}
    out: list[Send] = []
    for member, worker in job.assignment.items():
        job.handle(WorkerDescribed(member, "here", described(worker.stage)))
        out += job.handle(WorkerReady(member)).sends
    reports = [(to, announced_to(members[to], message)) for to, message in out]
    for member, report in reports:
        out = job.handle(MessageReceived(member, report)).sends
    for to, message in [*out, *planned(job)]:
        deliver(members[to], message)
    return job, members


def described(stage: int) -> dict[int, list[tuple[str, int]]]:
    layers = range(stage * LAYERS, (stage + 1) * LAYERS)
    return {layer: [(f"layers.{layer}.{number}", 1 << 20) for number in range(UNITS)] for layer in layers}


def units(stage: int) -> list[UnitId]:
    return [UnitId(layer, number) for layer in described(stage) for number in range(UNITS)]


def one_death(pipelines: int, stages: int, microbatches: int, at: float) -> dict[str, float]:
    """Seconds of each phase after the death of a worker. at: time of the death as a share of the step."""
    job, members = under_way(pipelines, stages, microbatches)
    steady = plan(job.problem)
    busy = work(steady, members, at * steady.makespan)

    victim = pipelines // 2 * stages + stages // 2
    begun = time.perf_counter()
    announced = job.handle(WorkerDied(victim)).sends
    encoded(announced)
    announced_at = time.perf_counter()
    frames = [(to, encode(announced_to(members[to], message, busy[to]))) for to, message in announced]
    ready = time.perf_counter()
    reported: list[tuple[int, Any]] = [(member, FROM_WORKER.decode(frame[4:])) for member, frame in frames]
    known = time.perf_counter()
    for member, report in reported:
        adopted = job.handle(MessageReceived(member, report)).sends
    size = encoded(adopted)
    adopting = time.perf_counter()
    planned_ahead = planned(job)
    size += encoded(planned_ahead)
    end = time.perf_counter()
    return {"announce": announced_at - begun, "hear": known - ready, "adopt": adopting - known,
            "follow": end - adopting, "megabytes": size / 1e6}  # fmt: skip


def planned(job: Job) -> list[Send]:
    problem = job.problem_now()
    job.steady.plan(problem)
    return job.handle(PlanMade(problem)).sends


def announced_to(member: Participant, message: Message, busy: float = 0.0) -> Report:
    assert isinstance(message, Announce)
    return member.announce(message, busy)


def deliver(member: Participant, message: Message) -> None:
    if isinstance(message, Adopt):
        member.adopt(message)
    elif isinstance(message, SteadyPlan):
        member.plan(message)


def work(steady: Plan, members: dict[int, Participant], now: float) -> dict[int, float]:
    """Marks ops that the plan starts before `now` as done. Returns the remaining time of each member's last such op."""
    busy, players = dict.fromkeys(members, 0.0), {of.worker: member for member, of in members.items()}
    order = steady.running_order()
    a = steady.arrays.take(order)
    begun = a.take(a.start < now)
    keys = steady.problem.microbatch_keys()
    for kind, g, s, d, end in zip(*(column.tolist() for column in columns(begun)), strict=True):
        if kind != O:
            member = players[Worker(d, s)]
            record = members[member].record(0)
            record.begin(KINDS[kind], keys[g])
            record.finish()
            busy[member] = max(busy[member], end - now)
    return busy


def columns(a: Any) -> tuple[Any, ...]:
    return a.kind, a.microbatch, a.stage, a.pipeline, a.end


def encoded(out: Iterable[Send]) -> int:
    """Total size of the encoded messages in bytes. A message to several receivers is encoded once."""
    size, said, frame = 0, None, b""
    for _, message in out:
        if message is not said:
            said, frame = message, encode(message)
        size += len(frame)
    return size


if __name__ == "__main__":
    sys.exit(main())
