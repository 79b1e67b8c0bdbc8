"""Time to plan a large job, by part, and a lower bound on it.

    python bench/plan_parts.py                    # 128x32x128 with ten deaths, and with one more
    python bench/plan_parts.py --times 21

The job is planned in blocks. After one more death, only one block is planned again. The bench prints CPU milliseconds
(medians):

    job         bound and division of the whole job, and the problems of its blocks
    arrays      arrays of a block (one in the middle), and the workers that take over micro-batches of dead ones
    schedule    its list schedule
    visit       each op visited once in a known order (`timing.latest`), the minimum for a list schedule
    plan        job + blocks * (arrays + schedule)
    bound       job + blocks * (arrays + visit)

The results are also in bench/out/plan-parts.json.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any, TypeVar

from planner import SIZES
from recycle_schedules import Problem
from recycle_schedules.bounds import lower_bound
from recycle_schedules.compiled import load
from recycle_schedules.planner.block_decomposition import _late, _part, divide, forget
from recycle_schedules.planner.candidates import simulated
from recycle_schedules.planner.instance import Instance
from recycle_schedules.planner.partial_schedule import PartialSchedule
from recycle_schedules.planner.policies import FOREIGN, Choices
from results import save

T = TypeVar("T")
PARTS = ("job", "arrays", "schedule", "visit", "plan", "bound")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=9, help="repetitions; medians are printed (default 9)")
    arguments = parser.parse_args()
    load()
    D, P, M, dead, further = SIZES[-1]
    limit = {"base": "1f1b", "extra": 2}
    print(f"{'dead':>4} {'blocks':>6} {'ops':>8}", *(f"{name:>9}" for name in PARTS))
    rows = []
    for deaths, blocks in ((dead, None), ([*dead, further], 1)):
        problem = Problem(pipelines=D, stages=P, microbatches=M, failed=deaths, memory_limit=limit)
        rows.append(parts(problem, blocks, arguments.times))
        shown = (f"{1e3 * rows[-1][name]:6.1f} ms" for name in PARTS)
        print(f"{len(deaths):4} {rows[-1]['blocks']:6} {rows[-1]['ops']:8}", *shown)
    save("plan-parts.json", rows)
    return 0


def parts(problem: Problem, blocks: int | None, times: int) -> dict[str, Any]:
    """Median CPU seconds of each part. blocks: number of blocks to plan; None: all."""
    seconds: dict[str, list[float]] = {name: [] for name in PARTS[:4]}

    def timed(name: str, make: Callable[[], T]) -> T:
        begin = time.process_time()
        found = make()
        seconds[name].append(time.process_time() - begin)
        return found

    for _ in range(times):
        forget()
        p = problem.replace()  # a copy without cached derived values
        made = timed("job", partial(divided, p))
        hit = made[len(made) // 2]
        x, choices = timed("arrays", partial(prepared, hit))
        table = choices.table(2)[:1]
        *_, ends, codes, starts = timed("schedule", partial(simulated, x, choices, table, 0, late=False))
        schedule = PartialSchedule(codes, starts, choices.hosts[0])
        timed("visit", partial(_late, x, schedule, ends))
    row: dict[str, Any] = {name: median(each) for name, each in seconds.items()}
    row |= {"blocks": blocks or len(made), "ops": len(codes)}
    row["plan"] = row["job"] + row["blocks"] * (row["arrays"] + row["schedule"])
    row["bound"] = row["job"] + row["blocks"] * (row["arrays"] + row["visit"])
    return row


def divided(p: Problem) -> list[Problem]:
    return [_part(p, block) for block in divide(p, lower_bound(p))]


def prepared(block: Problem) -> tuple[Instance, Choices]:
    x = Instance.of(block)
    return x, Choices.of(x, turns=1, orders=FOREIGN + 1)


if __name__ == "__main__":
    sys.exit(main())
