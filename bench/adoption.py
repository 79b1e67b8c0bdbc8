"""What a death costs the coordinator itself, by the size of the job: no network, no workers, one process.

    python bench/adoption.py                      # 3x4x6 to 128x32x128 (4096 workers)
    python bench/adoption.py --sizes 16x8x64

A worker dies in the middle of a step of the planner's own schedule. The columns are what stands between the death and
the last message of each kind that leaves, in milliseconds: `announce` tells everybody, `hear` takes the frames of all
reports apart, `adopt` works out and plans what is left and writes one message a worker, `follow` does the same for the
steps after that, in a thread, while training goes on. `MB` is what adopt and follow send altogether. The shortest of
three deaths; results in bench/out/adoption.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from recycle_schedules import Plan, Problem, Worker, actions, plan
from recycle_schedules.compiled import load
from recycle_schedules.ops import KINDS

from recycle_pp.control.messages import encode
from recycle_pp.protocol.job import Job, Send
from recycle_pp.protocol.participant import Participant

OUT = Path(__file__).resolve().parent / "out" / "adoption.json"
SIZES = ["3x4x6", "6x8x32", "16x8x64", "64x16x128", "128x32x128"]
PHASES = ("announce", "hear", "adopt", "follow")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="DxPxM", help="pipelines, stages, micro-batches")
    parser.add_argument("--deaths", type=int, default=3, help="the shortest of so many (default 3)")
    arguments = parser.parse_args()
    load()
    print(f"{'job':>10} {'workers':>7}", *(f"{name:>9}" for name in PHASES), f"{'MB':>6}")
    rows = []
    for size in arguments.sizes:
        shape = tuple(map(int, size.split("x")))
        found = [one_death(*shape, at=0.5 + 0.1 * k) for k in range(arguments.deaths)]
        row = {"job": size} | {key: min(each[key] for each in found) for key in found[0]}
        rows.append(row)
        times = " ".join(f"{1e3 * row[name]:9.1f}" for name in PHASES)
        print(f"{size:>10} {shape[0] * shape[1]:7} {times} {row['megabytes']:6.2f}", flush=True)
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(rows, indent=1))
    return 0


def one_death(pipelines: int, stages: int, microbatches: int, at: float) -> dict[str, float]:
    """Seconds of each phase, when a worker dies after this share of a step."""
    problem = Problem(
        pipelines=pipelines, stages=stages, microbatches=microbatches, durations=dict.fromkeys("FIWO", 1.0)
    )
    job = Job(problem, steps=10, planner=plan, derive=actions)
    workers = problem.workers()
    members = {w: Participant(w, stages) for w in workers}
    out: list[Send] = []
    for worker in workers:
        out += job.ready(worker)
    reports = [members[to].announce(message) for to, message in out]
    for report in reports:
        out = job.receive(Worker(*report["worker"]), report)
    for to, message in [*out, *job.planned(job.steady.plan(job.problem_now()))]:
        deliver(members[to], message)
    steady = plan(problem)
    busy = work(steady, members, at * steady.makespan)

    victim = Worker(pipelines // 2, stages // 2)
    begun = time.perf_counter()
    announced = job.died(victim)
    encoded(announced)
    told = time.perf_counter()
    frames = [encode(members[to].announce(message, busy[to])) for to, message in announced]
    ready = time.perf_counter()
    heard = [json.loads(frame[4:]) for frame in frames]
    known = time.perf_counter()
    for report in heard:
        adopted = job.receive(Worker(*report["worker"]), report)
    size = encoded(adopted)
    adopting = time.perf_counter()
    followed = job.planned(job.steady.plan(job.problem_now()))
    size += encoded(followed)
    end = time.perf_counter()
    return {"announce": told - begun, "hear": known - ready, "adopt": adopting - known, "follow": end - adopting,
            "megabytes": size / 1e6}  # fmt: skip


def deliver(member: Participant, message: dict[str, Any]) -> None:
    if message["type"] == "adopt":
        member.adopt(message)
    else:
        member.plan(message)


def work(steady: Plan, members: dict[Worker, Participant], now: float) -> dict[Worker, float]:
    """Everybody has done what the plan has begun until `now`; how long each is busy with its last op."""
    busy = dict.fromkeys(members, 0.0)
    order = steady.running_order()
    a = steady.arrays.take(order)
    begun = a.take(a.start < now)
    keys = steady.problem.microbatch_keys()
    for kind, g, s, d, end in zip(*(column.tolist() for column in columns(begun)), strict=True):
        if KINDS[kind] != "O":
            record = members[Worker(d, s)].record(0)
            record.begin(KINDS[kind], keys[g])
            record.finish()
            busy[Worker(d, s)] = max(busy[Worker(d, s)], end - now)
    return busy


def columns(a: Any) -> tuple[Any, ...]:
    return a.kind, a.microbatch, a.stage, a.pipeline, a.end


def encoded(out: Iterable[Send]) -> int:
    """Bytes; who gets the very same message gets the same frame."""
    size, said, frame = 0, None, b""
    for _, message in out:
        if message is not said:
            said, frame = message, encode(message)
        size += len(frame)
    return size


if __name__ == "__main__":
    sys.exit(main())
