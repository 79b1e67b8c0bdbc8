"""Quality and speed of the planner.

    python bench/planner.py                      # golden problems: value, best known, bound, gap, time
    python bench/planner.py --scale              # time to plan and gap from 3x4x6 to 4096 workers
    python bench/planner.py --links              # hosts and links: time to plan, and the cost of ignoring them
    python bench/planner.py --layers             # moved layers, compared with re-routing and with layouts per pipeline
    python bench/planner.py --ahead              # plans for every next death: time to make them and to look them up,
                                                 # and the delay of an event loop while a thread makes them
    python bench/planner.py --golden DIR --seconds 0.8

Prints one table and writes bench/out/planner.json (or planner-scale.json, planner-links.json, ...). The validator
checks every plan. Times are wall and CPU seconds of this process. A busy machine does not stretch CPU seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from recycle_schedules import Plan, Problem, plan, plan_layout
from recycle_schedules.analysis.simulate import simulate
from recycle_schedules.compiled import load
from recycle_schedules.planner import plan_rerouted
from recycle_schedules.planner.block_decomposition import forget
from recycle_schedules.planner.store import PlanStore
from recycle_schedules.validate import validate
from results import save

from recycle_pp.coordinator.host import SWITCH_SECONDS

T = TypeVar("T")
Dead = tuple[int, int]  # pipeline and stage
GOLDEN = Path(__file__).resolve().parents[2] / "shared" / "golden"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--golden", type=Path, default=GOLDEN, help="folder with golden problems (*.json)")
    parser.add_argument("--seconds", type=float, default=0.75, help="search time of each golden problem (default 0.75)")
    parser.add_argument("--scale", action="store_true", help="large jobs instead")
    parser.add_argument("--links", action="store_true", help="jobs on hosts with links between them instead")
    parser.add_argument("--layers", action="store_true", help="jobs whose layers may move between stages instead")
    parser.add_argument("--ahead", action="store_true", help="plans for the next deaths instead")
    parser.add_argument("--times", type=int, default=5, help="repetitions of --scale; medians are printed (default 5)")
    arguments = parser.parse_args()
    begin = time.perf_counter()
    load()
    print(f"machine code loaded in {time.perf_counter() - begin:.1f} s")
    if arguments.ahead:
        rows, name = ahead(), "planner-ahead.json"
    elif arguments.layers:
        rows, name = layered(), "planner-layers.json"
    elif arguments.links:
        rows, name = linked(), "planner-links.json"
    elif arguments.scale:
        rows, name = scale(arguments.times), "planner-scale.json"
    else:
        rows, name = golden(arguments.golden, arguments.seconds), "planner.json"
    save(name, rows)
    return 0 if all(row["errors"] == 0 for row in rows) else 1


def golden(folder: Path, seconds: float) -> list[dict[str, Any]]:
    """Every problem of the folder's files."""
    cases = [case for file in sorted(folder.glob("*.json")) for case in json.loads(file.read_text())]
    if not cases:
        sys.exit(f"no golden problems in {folder}")
    print(f"{'problem':62} {'value':>8} {'best':>8} {'bound':>8} {'over best':>9} {'proven':>6} {'s':>5}")
    rows = []
    for case in cases:
        problem = Problem.from_json(case["problem"])
        found, wall, cpu = timed(partial(plan, problem, seconds=seconds))
        over = found.value / case["best"] - 1
        proven = case["proven_optimal"]
        row = {"name": case["name"], "value": found.value, "best": case["best"], "bound": found.lower_bound}
        rows.append(row | {"over": over, "proven": proven, "wall": wall, "cpu": cpu, "errors": len(validate(found))})
        print(
            f"{case['name'][:62]:62} {found.value:8g} {case['best']:8g} {found.lower_bound:8g} {100 * over:8.2f}% "
            f"{'yes' if proven else 'no':>6} {wall:5.2f}"
        )
    at_best = sum(row["over"] < 1e-9 for row in rows)
    of_proven = [row["over"] < 1e-9 for row in rows if row["proven"]]
    worst, longest = (max(row[key] for row in rows) for key in ("over", "wall"))
    print(
        f"{at_best} of {len(rows)} at the best known value or below it, {sum(of_proven)} of {len(of_proven)} proven "
        f"ones; worst {100 * worst:.2f} % above; longest {longest:.2f} s"
    )
    return rows


SIZES: list[tuple[int, int, int, list[Dead], Dead]] = [
    (3, 4, 6, [(1, 2)], (0, 1)),
    (16, 8, 64, [(1, 2), (5, 3), (9, 6)], (12, 4)),
    (64, 16, 128, [(1, 2), (17, 3), (30, 9), (41, 7), (60, 15)], (52, 12)),
    (128, 32, 128, [(5 + 12 * k, (7 * k + 2) % 32) for k in range(10)], (60, 31)),
]
"""Pipelines, stages, micro-batches, deaths, and one more death."""


def scale(repetitions: int) -> list[dict[str, Any]]:
    """Time to plan with the given deaths, and then with one further death. The planned blocks of an earlier repetition
    are forgotten."""
    heads = (("job", 14), ("dead", 4), ("memory", 7), ("ops", 8), ("plan", 8), ("cpu", 8), ("all ops", 8))
    print(*(f"{name:>{width}}" for name, width in (*heads, ("value", 7), ("gap", 6))))
    rows = []
    for D, P, M, dead, further in SIZES:
        for name, memory in (("1f1b+2", {"base": "1f1b", "extra": 2}), ("none", None)):
            problem = Problem(pipelines=D, stages=P, microbatches=M, failed=dead, memory_limit=memory)
            pair = problem, problem.replace(failed=[*dead, further])
            plans: dict[Problem, Plan] = {}
            times: list[list[tuple[float, float, float]]] = [[], []]
            for _ in range(repetitions):
                forget()
                for k, p in enumerate(pair):
                    found, wall, cpu = timed(partial(plan, p.replace()))  # a copy without cached derived values
                    plans[p] = found
                    times[k].append((wall, cpu, timed(partial(getattr, found, "arrays"))[1]))
            for p, of in zip(pair, times, strict=True):
                found = plans[p]
                wall, cpu, ops = map(median, zip(*of, strict=True))
                row = {"job": f"{D}x{P}x{M}", "dead": len(p.dead), "memory": name, "ops": len(found), "wall": wall}
                row |= {
                    "cpu": cpu,
                    "arrays": ops,
                    "value": found.value,
                    "gap": found.gap,
                    "errors": len(validate(found)),
                }
                rows.append(row)
                shown = " ".join(f"{1e3 * t:5.1f} ms" for t in (wall, cpu, ops))
                print(f"{row['job']:>14} {len(p.dead):4} {name:>7} {len(found):8} {shown}", end=" ")
                print(f"{found.value:7g} {100 * found.gap:5.2f}%")
    return rows


def ahead() -> list[dict[str, Any]]:
    """Plans for every next death of a uniform job, with their action lists: number, size, and median CPU time to make a
    plan and to look one up. Then the delay of an event loop without and with a thread that makes them (`delays`)."""
    print(f"{'job':>14} {'plans':>6} {'MB':>8} {'made':>10} {'looked up':>10} {'loop idle':>10} {'planning':>10}")
    rows = []
    for D, P, M, _, _ in SIZES[:3]:
        problem = Problem(pipelines=D, stages=P, microbatches=M, memory_limit={"base": "1f1b", "extra": 2})
        store = PlanStore(forwards=2, most_bytes=1 << 40)
        made = [timed(partial(store.plan, p)) for p in store.ahead(problem)]
        # The store contains the equal death (D - 1, s) for each of these.
        found = [timed(partial(store.plan, problem.replace(failed=[(0, s)]))) for s in range(P)]
        size, errors = sum(plans.size for plans, _, _ in made), sum(len(validate(plans.plan)) for plans, _, _ in found)
        seconds = [median(cpu for _, _, cpu in of) for of in (made, found)]
        again = PlanStore(forwards=2, most_bytes=1 << 40)
        quiet, busy = delays(partial(time.sleep, 2)), delays(partial(make_all, again, problem))
        row = {"job": f"{D}x{P}x{M}", "plans": len(store), "bytes": size, "made": seconds[0], "found": seconds[1]}
        rows.append(row | {"quiet": quiet, "busy": busy, "errors": errors})
        times = " ".join(f"{1e3 * t:7.1f} ms" for t in (*seconds, quiet, busy))
        print(f"{row['job']:>14} {len(store):6} {size / 1e6:8.1f} {times}")
    return rows


def make_all(store: PlanStore, problem: Problem) -> None:
    for after in store.ahead(problem):
        store.plan(after)


def delays(work: Callable[[], object]) -> float:
    """99th percentile of a timer's delay in an event loop, in seconds, while a thread does the work. The loop's thread
    gets the interpreter as quickly as in the coordinator."""

    async def ticks() -> list[float]:
        found: list[float] = []
        task = asyncio.create_task(asyncio.to_thread(work))
        while not task.done() or len(found) < 20:
            begin = time.perf_counter()
            await asyncio.sleep(0.001)
            found.append(time.perf_counter() - begin - 0.001)
        return sorted(found)

    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        found = asyncio.run(ticks())
    finally:
        sys.setswitchinterval(before)
    return found[len(found) * 99 // 100]


def linked() -> list[dict[str, Any]]:
    """Jobs with two pipelines on each host. Half of the hosts are in another zone, with five times the latency."""
    heads = (("job", 14), ("dead", 4), ("latency", 7), ("plan", 9), ("without", 9), ("value", 8), ("ignoring", 8))
    print(*(f"{name:>{width}}" for name, width in (*heads, ("gap", 6))))
    rows = []
    for D, P, M, dead, _ in SIZES[:3]:
        hosts = [[f"host {d // 2}"] * P for d in range(D)]
        zones = {f"host {k}": "west" if 4 * k < D else "east" for k in range((D + 1) // 2)}
        for latency in (0.1, 1.0):
            kinds = {"between_hosts": {"latency": latency}, "between_zones": {"latency": 5 * latency}}
            problem = Problem(
                pipelines=D, stages=P, microbatches=M, failed=dead, memory_limit={"base": "1f1b", "extra": 2},
                links={"hosts": hosts, "zones": zones, "within_host": {"latency": 0.02}} | kinds,
            )  # fmt: skip
            found, wall, cpu = timed(partial(plan, problem))
            plain, without, _ = timed(partial(plan, problem.replace(links=None)))
            ignoring = simulate(plain, links=problem.links).value
            row = {"job": f"{D}x{P}x{M}", "dead": len(dead), "latency": latency, "wall": wall, "cpu": cpu}
            row |= {"without": without, "value": found.value, "ignoring": ignoring, "gap": found.gap}
            rows.append(row | {"errors": len(validate(found))})
            print(f"{row['job']:>14} {len(dead):4} {latency:7g} {1e3 * wall:6.1f} ms {1e3 * without:6.1f} ms", end=" ")
            print(f"{found.value:8g} {ignoring:8g} {100 * found.gap:5.2f}%")
    return rows


MOVED: list[tuple[str, tuple[int, int, int], list[tuple[int, int]], dict[str, Any]]] = [
    ("equal", (3, 4, 6), [(1, 2)], {}),
    ("equal", (2, 4, 8), [(1, 2)], {}),
    ("equal", (4, 8, 16), [(1, 3)], {}),
    ("equal", (3, 4, 12), [(1, 2)], {}),
    ("equal", (8, 8, 32), [(1, 3), (2, 3), (4, 6)], {}),
    ("two dead", (3, 4, 12), [(1, 2), (2, 0)], {}),
    ("two of a stage", (4, 4, 12), [(1, 2), (2, 2)], {}),
    ("three dead", (6, 6, 24), [(0, 1), (3, 1), (4, 5)], {}),
    ("every third slow", (3, 4, 12), [(1, 2)], {"layer": [1, 1, 3]}),
    ("big head", (3, 4, 12), [(1, 2)], {"head": 12}),
    ("big head, none dead", (2, 4, 16), [], {"head": 12}),
    ("slow worker", (3, 4, 12), [(1, 2)], {"speed": {"0,1": 0.7}}),
    ("optimizer step", (3, 4, 12), [(1, 2)], {"O": 0.5}),
    ("room for 11 layers", (3, 4, 12), [(1, 2)], {"capacity": 11 * 4.0}),
    ("room for 9 layers", (3, 4, 12), [(1, 2)], {"capacity": 9 * 4.0}),
    ("4 layers a stage", (3, 4, 12), [(1, 2)], {"layers": 4}),
    ("few layers, large", (16, 8, 64), [(1, 3), (5, 3)], {"layers": 4}),
    ("equal, large", (64, 16, 128), [(1, 2), (17, 3), (30, 9)], {}),
    ("equal, 4096 workers", (64, 64, 128), [(1, 3)], {}),
]
"""Name; pipelines, stages, micro-batches; deaths; differences from a job of 8 equal layers a stage with F = I = W."""


def layered() -> list[dict[str, Any]]:
    """Jobs whose layers may move.

    Compares the plan with re-routing alone, the plan with moved boundaries, the bound over all layouts, and the best
    case of layouts that differ between pipelines.
    """
    heads = [("job", 10), ("dead", 4), ("memory", 6)]
    heads += [(name, 9) for name in ("1F1B", "re-routed", "moved", "own", "bound")]
    print(f"{'':20}", *(f"{name:>{width}}" for name, width in (*heads, ("gap", 6), ("cpu", 7))), " layers")
    rows = []
    for name, (D, P, M), dead, other in MOVED:
        for memory, limit in (("none", None), ("1f1b+2", {"base": "1f1b", "extra": 2})):
            problem = layered_problem(D, P, M, dead, limit, **other)
            found, wall, cpu = timed(partial(plan_layout, problem))
            rerouted, own = plan_rerouted(problem), own_layouts(problem)
            one_f_one_b = problem.replace(
                failed=(), backward="coupled", optimizer="barrier", speed={}, memory_limit={"base": "1f1b", "extra": 0}
            )
            usual = plan(one_f_one_b.with_layout(rerouted.layout or ())).value
            row = {"name": name, "job": f"{D}x{P}x{M}", "dead": dead, "memory": memory, "1f1b": usual, "own": own}
            row |= {"rerouted": rerouted.value, "value": found.value, "bound": found.lower_bound, "gap": found.gap}
            row |= {"wall": wall, "cpu": cpu, "layout": found.layout, "errors": len(validate(found))}
            rows.append(row)
            figures = usual, rerouted.value, found.value, math.nan if own is None else own, found.lower_bound
            layout = " ".join(map(str, found.layout or ())) if P <= 8 else "..."
            print(f"{name:20} {row['job']:>10} {len(dead):4} {memory:>6}", *(f"{x:9.5g}" for x in figures), end=" ")
            print(f"{100 * found.gap:5.2f}% {1e3 * cpu:4.0f} ms  {layout}", flush=True)
    return rows


def layered_problem(
    D: int, P: int, M: int, dead: list[tuple[int, int]], memory: Any, *, layers: int = 8, layer: Sequence[float] = (1,),
    head: float | None = None, capacity: float | None = None, O: float = 0.0, **other: Any,
) -> Problem:  # fmt: skip
    """A problem in which F, I and W of a stage of `layers` equal layers take one slot each.

    layer     relative times of the layers, repeated
    head      relative time of the last layer
    capacity  bytes; a layer takes 1 byte, plus 1 for each micro-batch in flight
    """
    times = [float(layer[k % len(layer)]) for k in range(layers * P)]
    if head is not None:
        times[-1] = head
    each = [t * P / sum(times) for t in times] if head is None else [t / layers for t in times]
    given: dict[str, Any] = {"F": each, "I": each, "W": each}
    given |= {"O": [O / layers] * len(each)} if O else {}
    given |= {"bytes": [1.0] * len(each), "activation_bytes": [0.5] * len(each)} if capacity else {}
    return Problem(pipelines=D, stages=P, microbatches=M, failed=dead, memory_limit=memory, layers=given,
                   capacity_bytes=capacity, **other)  # fmt: skip


def own_layouts(problem: Problem) -> float | None:
    """Best-case period if each pipeline divides all layers among its own live workers and re-routes nothing.

    Assumes optimal shares of the micro-batches and no wait for other pipelines' gradients. None if a pipeline has lost
    two workers, workers differ in speed, memory is in bytes, or the job is large.
    """
    D, P, N = problem.pipelines, problem.stages, problem.total
    hit = len({w.pipeline for w in problem.dead})
    if hit != len(problem.dead) or not 0 < hit < D or problem.speed or problem.capacity_bytes or N * P > 3000:
        return None

    def value(stages: int, microbatches: int) -> float:
        one = problem.replace(pipelines=1, stages=stages, microbatches=microbatches, failed=())
        return plan_layout(one).value

    even = N * (P - 1) / (D * P - hit)
    tried = range(max(1, int(even) - 1), int(even) + 3)
    return min(max(value(P - 1, m), value(P, -(-(N - hit * m) // (D - hit)))) for m in tried)


def timed(make: Callable[[], T]) -> tuple[T, float, float]:
    """The result, wall seconds, CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    found = make()
    return found, time.perf_counter() - wall, time.process_time() - cpu


if __name__ == "__main__":
    sys.exit(main())
