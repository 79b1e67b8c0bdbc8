"""Cost of one more death in jobs of up to 16,384 workers, in one process without network: plan, notify, rebuild.

    python bench/growth.py                            # 12 to 16,384 workers
    python bench/growth.py --sizes 64x64x64 --times 5

One worker has already died. A second one dies in the middle of a step. The planner, the action lists, the messages and
a worker's groups are real. Nothing runs the plans, and no socket carries the messages. The bench prints CPU
milliseconds (medians) and bytes:

    steps       plan the later steps; blocks of pipelines that the death does not touch are already planned
    rest        plan the rest of the broken step
    lists       derive every worker's list of actions for the rest
    encode      encode the announcement of the generation, once for all workers
    frame       size of the announcement in kB
    all         size in MB of all announcements and lists that the coordinator sends
    decode      a worker decodes the announcement
    groups      a worker finds its peers and the groups of the new generation
    peers       workers in the group in which a worker reduces
    stored      size in kB of the values with which the workers agree on the groups to keep (Gloo, NCCL). The
                coordinator sends all of them to every worker

The last row gives the exponent with which each figure grows between the last two sizes. 1 means growth in proportion to
the number of workers. The results are also in bench/out/growth.json.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any, TypeVar

import msgspec
import numpy as np
from recycle_schedules import Plan, Problem, Worker, actions, plan
from recycle_schedules.compiled import load
from recycle_schedules.op_kinds import O
from recycle_schedules.planner.block_decomposition import forget
from recycle_schedules.progress import Progress
from recycle_schedules.validate import validate
from results import save

from recycle_pp.comm.groups import Groups
from recycle_pp.protocol.assignment import initial
from recycle_pp.wire.frames import encode
from recycle_pp.wire.messages.generations import Announce
from recycle_pp.wire.messages.lifecycle import StoreValues
from recycle_pp.wire.messages.workers import TO_WORKER

T = TypeVar("T")
SIZES = ["3x4x6", "16x8x64", "64x16x64", "64x64x64", "256x64x64"]
TIMES = ("steps", "rest", "lists", "encode", "decode", "groups")
SIZED = ("frame", "all", "peers", "stored")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="DxPxM", help="pipelines, stages, micro-batches")
    parser.add_argument("--times", type=int, default=3, help="repetitions; medians are printed (default 3)")
    arguments = parser.parse_args()
    load()
    print(f"{'job':>12} {'workers':>7} {'ops':>9}", *(f"{name:>9}" for name in (*TIMES, *SIZED)))
    rows: list[dict[str, Any]] = []
    for size in arguments.sizes:
        D, P, M = map(int, size.split("x"))
        rows.append(one_death(D, P, M, arguments.times))
        show(size, rows[-1])
    if len(rows) > 1:
        before, last = rows[-2:]
        more = math.log(last["workers"] / before["workers"])
        print(f"{'exponent':>30}", *(f"{math.log(last[k] / before[k]) / more:9.2f}" for k in (*TIMES, *SIZED)))
    save("growth.json", rows)
    return 0 if all(row["errors"] == 0 for row in rows) else 1


def show(size: str, row: dict[str, Any]) -> None:
    times = " ".join(f"{1e3 * row[name]:9.2f}" for name in TIMES)
    sizes = f"{row['frame'] / 1e3:9.1f} {row['all'] / 1e6:9.1f} {row['peers']:9} {row['stored'] / 1e3:9.1f}"
    print(f"{size:>12} {row['workers']:7} {row['ops']:9} {times} {sizes}", flush=True)


def one_death(pipelines: int, stages: int, microbatches: int, times: int) -> dict[str, Any]:
    """CPU seconds and bytes of each phase after the second death."""
    limit = {"base": "1f1b", "extra": 2}
    first, second = Worker(pipelines // 3, stages // 3), Worker(pipelines // 2, stages // 2)
    before = Problem(pipelines=pipelines, stages=stages, microbatches=microbatches, failed=[first], memory_limit=limit)
    steady, after = plan(before), before.replace(failed=[first, second])
    left = rest(steady, second)
    later, steps = timed(lambda: plan(after), times, planned_anew(before))
    remaining, rest_seconds = timed(lambda: plan(left), times)
    lists, list_seconds = timed(lambda: actions(remaining), times)

    every = initial(pipelines, stages)
    members = {member: worker for member, worker in every.items() if worker not in (first, second)}
    frame, encoding = timed(lambda: encode(Announce(generation=2, members=members, committed=5, base=0)), times)
    me = min(member for member, worker in members.items() if worker.stage == second.stage)
    _, decoding = timed(lambda: TO_WORKER.decode(frame[4:]), times)
    groups, grouping = timed(lambda: Groups(members, me), times)
    return {
        "workers": pipelines * stages,
        "ops": len(later),
        "steps": steps,
        "rest": rest_seconds,
        "lists": list_seconds,
        "encode": encoding,
        "decode": decoding,
        "groups": grouping,
        "frame": len(frame),
        "all": len(frame) * len(members) + lists.size,
        "peers": len(groups.peers),
        "stored": stored(len(members), every),
        "errors": len(validate(later)) + len(validate(remaining)),
    }


def rest(steady: Plan, dead: Worker) -> Problem:
    """The rest of a step after a worker dies in the middle. The worker's finished outputs are lost."""
    p, a = steady.problem, steady.arrays
    now = steady.makespan / 2 + float(a.start.min())
    lives = (a.kind != O) & ((a.pipeline != dead.pipeline) | (a.stage != dead.stage))
    ran = a.take(lives & (a.start < now))  # workers finish the ops that they have begun
    running = ran.take(ran.end > now)
    busy = zip(running.pipeline.tolist(), running.stage.tolist(), (running.end - now).tolist(), strict=True)
    bits = np.left_shift(1, ran.kind.astype(np.int64))
    done = Progress.ran(
        bits, ran.microbatch.astype(np.int64), ran.stage.astype(np.int64), ran.pipeline.astype(np.int64),
        (p.total, p.stages),
    )  # fmt: skip
    busy_until = {f"{d},{s}": seconds for d, s, seconds in busy}
    return p.replace(failed=[*p.dead, dead], done=done, busy_until=busy_until)


def planned_anew(before: Problem) -> Callable[[], object]:
    """Forgets all planned blocks and plans `before`, so that only the blocks of an earlier plan are known."""

    def again() -> None:
        forget()
        plan(before)

    return again


def stored(workers: int, every: dict[int, Worker]) -> int:
    """Bytes of the values with which each worker offers the groups that it holds: its stage's group and two pairs."""
    last = max(every)
    counts = {f"0/{Worker(0, 0)}-{every[last]}": [100], "0/a": [100, 100], "0/b": [100, 100]}
    one = ("2/idle/" + str(last), msgspec.msgpack.encode(counts))
    return len(encode(StoreValues([one]))) * workers


def timed(make: Callable[[], T], times: int, before: Callable[[], object] = lambda: None) -> tuple[T, float]:
    """The result, and the median of its CPU seconds. before: runs before each repetition, outside the time."""
    seconds = []
    for _ in range(times):
        before()
        begin = time.process_time()
        found = make()
        seconds.append(time.process_time() - begin)
    return found, median(seconds)


if __name__ == "__main__":
    sys.exit(main())
