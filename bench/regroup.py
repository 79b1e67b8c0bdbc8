"""Time to abort and rebuild the groups of a generation, for several numbers of workers.

    python bench/regroup.py [--workers 8 12 16] [--times 20]

In each round one worker counts as dead. It is not killed, so the number of processes stays the same. All others abort,
rebuild without this worker, and do a first all-reduce and a first message in each direction round the ring.

    death    connections are kept, as after a death
    join     all connections are made again, as when a worker joins; this process distributes the addresses
    all      from the announcement to the last message

The bench prints milliseconds of the slowest worker, medians over the rounds.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from typing import Any

from results import save

from recycle_pp.testing.rehearsal import Node, Rehearsal, grid
from recycle_pp.wire.messages.members import Assignment

STAGES = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 12, 16], help=f"multiples of {STAGES}")
    parser.add_argument("--times", type=int, default=20, help="rounds")
    arguments = parser.parse_args()
    rows = [measure(n, arguments.times, rebuilt) for n in arguments.workers for rebuilt in (False, True)]
    columns = list(rows[0])
    print("  ".join(f"{name:>13}" for name in columns))
    for row in rows:
        print("  ".join(f"{v:13.1f}" if isinstance(v, float) else f"{v!s:>13}" for v in row.values()))
    save("regroup.json", rows)


def measure(workers: int, times: int, rebuilt: bool) -> dict[str, Any]:
    members = grid(workers // STAGES, STAGES)
    samples: dict[str, list[float]] = {"abort": [], "rebuild": [], "first sum": [], "first message": [], "all": []}
    with Rehearsal(members, worker) as play:
        play.send("build", 0, members, 0)
        play.reports(workers)
        for generation in range(1, times + 1):
            time.sleep(0.3)  # let the cleanup threads finish
            live = {member: role for member, role in members.items() if member != generation % workers}
            start = time.perf_counter()
            play.send("build", generation, live, generation if rebuilt else 0, to=live)
            reports = [report for _, report in play.reports(len(live))]
            samples["all"].append(time.perf_counter() - start)
            for name, value in zip(samples, zip(*reports, strict=True), strict=False):
                samples[name].append(max(value))
    medians = {name: 1e3 * statistics.median(values) for name, values in samples.items()}
    return {
        "workers": workers,
        "connections": "join" if rebuilt else "death",
        **medians,
        "worst": 1e3 * max(samples["all"]),
    }


def worker(node: Node) -> None:
    import torch

    while True:
        _, generation, members, base = node.receive()
        clock = [time.perf_counter()]
        node.links.abort()
        clock.append(time.perf_counter())
        node.links.rebuild(generation, members, node.me, base)
        clock.append(time.perf_counter())
        node.links.all_reduce([torch.ones(1000)]).wait()
        clock.append(time.perf_counter())
        ring(node, members)
        clock.append(time.perf_counter())
        node.report([after - before for before, after in itertools.pairwise(clock)])


def ring(node: Node, members: Assignment) -> None:
    import torch

    order = sorted(members)
    here = order.index(node.me)
    after, before = order[(here + 1) % len(order)], order[here - 1]
    works = [node.links.receive(torch.empty(1000), before, 1), node.links.receive(torch.empty(1000), after, 2)]
    works += [node.links.send(torch.ones(1000), after, 1), node.links.send(torch.ones(1000), before, 2)]
    for work in works:
        work.wait()


if __name__ == "__main__":
    main()
