"""Cost of a message, a sum and a new generation, over TCP links, Gloo's groups and the process group "recycle".

    OMP_NUM_THREADS=1 python bench/links.py [--rounds 15]

The processes communicate over loopback. Every round measures all three in turn, so that other load affects them alike.
The bench prints medians over the rounds: wall milliseconds of the slowest process, total CPU milliseconds of all
processes, and the ratios to TCP in the same round. In "new generation" the same members abort, rebuild and sum one
number, as after a death.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

from results import save

from recycle_pp.testing.rehearsal import Node, Rehearsal, grid
from recycle_pp.wire.messages.members import Assignment

FACES = ("tcp", "gloo", "group")  # ratios are relative to the first of these
# name -> (bytes, operations a round)
MESSAGES = {"4 KiB there and back": (1 << 12, 200), "64 KiB there and back": (1 << 16, 100)}
STREAMS = {f"{mib} MiB x 8, one way": (mib << 20, 8) for mib in (1, 4, 16)}
SUMS = {"sum of 4 KiB": (1 << 12, 50), "sum of 1 MiB": (1 << 20, 10), "sum of 16 MiB": (1 << 24, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    rows = measure(grid(1, 2), [*MESSAGES, *STREAMS], rounds)
    for peers in (2, 3, 4):
        rows += measure(grid(peers, 1), [*SUMS, "new generation"], rounds)
    heads = "".join(f"{face + ' ms':>10}{'cpu ms':>9}{'ratio':>7}{'cpu':>6}" for face in FACES)
    print(f"{'workers':>7}  {'what':24}{heads}")
    for row in rows:
        line = f"{row['workers']:7}  {row['what']:24}"
        for face in FACES:
            line += "{wall:10.3f}{cpu:9.3f}{wall_ratio:7.2f}{cpu_ratio:6.2f}".format(**row[face])
        print(line)
    save("links.json", rows)


def measure(members: Assignment, cases: list[str], rounds: int) -> list[dict[str, Any]]:
    samples: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    with Rehearsal(members, worker) as play:
        for _ in range(rounds + 1):
            for case in cases:
                for face in FACES:
                    play.send(face, case)
                    reports = [report for _, report in play.reports(len(members))]
                    samples[case, face].append((max(wall for wall, _ in reports), sum(cpu for _, cpu in reports)))
    rows = [{face: summary(samples, case, face) for face in FACES} for case in cases]
    return [{"workers": len(members), "what": case, **row} for case, row in zip(cases, rows, strict=True)]


def summary(samples: dict[tuple[str, str], list[tuple[float, float]]], case: str, face: str) -> dict[str, float]:
    mine, base = samples[case, face][1:], samples[case, FACES[0]][1:]  # the first round warms up
    return {
        "wall": 1e3 * statistics.median(wall for wall, _ in mine),
        "cpu": 1e3 * statistics.median(cpu for _, cpu in mine),
        "wall_ratio": statistics.median(a[0] / b[0] for a, b in zip(mine, base, strict=True)),
        "cpu_ratio": statistics.median(a[1] / b[1] for a, b in zip(mine, base, strict=True)),
    }


# ------------------------------------------------------------------------------------------------- in a worker


def worker(node: Node) -> None:
    """Runs the requested case over the requested links, and reports (wall, CPU) seconds of one operation."""
    faces = {"tcp": ByLinks(node, "tcp"), "gloo": ByLinks(node, "gloo"), "group": ByGroup(node)}
    while True:
        face, case = node.receive()
        node.report(run(faces[face], case, node.me))


def run(face: Any, case: str, rank: int) -> tuple[float, float]:
    import torch

    if case == "new generation":
        return timed(face.rebuild, 3)
    nbytes, count = {**MESSAGES, **STREAMS, **SUMS}[case]
    tensors = [torch.zeros(nbytes // 4) for _ in range(8)]
    operations: dict[str, Callable[[], None]] = {
        "there and back": partial(there_and_back, face, rank, tensors),
        "one way": partial(one_way, face, rank, tensors),
        "sum": partial(face.sum, tensors[0]),
    }
    operation = next(function for name, function in operations.items() if name in case)
    operation()  # after this call, all processes are ready
    return timed(operation, 1 if operation is operations["one way"] else count)


def timed(operation: Callable[[], None], count: int) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(count):
        operation()
    return (time.perf_counter() - wall) / count, (time.process_time() - cpu) / count


def there_and_back(face: Any, rank: int, tensors: list[Any]) -> None:
    """Sends a message to rank 1 and one back. Posts the receive first, like the trainer's mailbox."""
    receiving = face.receive(tensors[0], 1 - rank, 1)
    if rank == 1:
        receiving.wait()
    face.send(tensors[1], 1 - rank, 1)
    if rank == 0:
        receiving.wait()


def one_way(face: Any, rank: int, tensors: list[Any]) -> None:
    """Sends all tensors to rank 1, and one byte back after the last one has arrived."""
    import torch

    byte = torch.zeros(1)
    if rank == 0:
        works = [face.receive(byte, 1, 3)] + [face.send(tensor, 1, 2) for tensor in tensors]
    else:
        works = [face.receive(tensor, 0, 2) for tensor in tensors]
    for work in works:
        work.wait()
    if rank == 1:
        face.send(byte, 0, 3).wait()


class ByLinks:
    def __init__(self, node: Node, backend: str):
        import torch

        from recycle_pp.comm.links import Links
        from recycle_pp.execution.transports import transport_for

        self.node, self.generation = node, -1
        self.links = Links(transport_for(backend, node.store, torch.device("cpu"), size=len(node.members)))
        self.rebuild()

    def rebuild(self) -> None:
        """Starts a new generation with the same members, and does its first sum, as after a death."""
        import torch

        self.generation += 1
        self.links.rebuild(self.generation, self.node.members, self.node.me, 0)
        self.links.connect([m for m, worker in self.node.members.items() if worker.stage != self.node.worker.stage])
        self.sum(torch.ones(1))

    def send(self, tensor: Any, to: int, tag: int) -> Any:
        return self.links.send(tensor, to, tag)

    def receive(self, tensor: Any, frm: int, tag: int) -> Any:
        return self.links.receive(tensor, frm, tag)

    def sum(self, tensor: Any) -> None:
        self.links.all_reduce([tensor]).wait()


class ByGroup:
    def __init__(self, node: Node):
        import torch.distributed as dist

        import recycle_pp.comm.torch_backend.process_group  # noqa: F401  (registers the backend)

        self.rank, self.size, self.generation = node.me, len(node.members), 0
        store = dist.PrefixStore("group", node.store)
        dist.init_process_group("recycle", store=store, rank=self.rank, world_size=self.size)

    def rebuild(self) -> None:
        import torch
        import torch.distributed as dist

        self.generation += 1
        group: Any = dist.group.WORLD
        group.rebuild(self.generation, self.rank, self.size)
        self.sum(torch.ones(1))

    def send(self, tensor: Any, to: int, tag: int) -> Any:
        import torch.distributed as dist

        self.sent = dist.isend(tensor, to, tag=tag)
        return self.sent

    def receive(self, tensor: Any, frm: int, tag: int) -> Any:
        import torch.distributed as dist

        return dist.irecv(tensor, frm, tag=tag)

    def sum(self, tensor: Any) -> None:
        import torch.distributed as dist

        dist.all_reduce(tensor)


if __name__ == "__main__":
    main()
