"""Tests the trainer's links over NCCL without a trainer. `gpu.py` does this before it runs whole jobs.

    python bench/gpu_links.py alone                   # one rank
    python bench/gpu_links.py pair                    # two ranks, which may share a GPU
    python bench/gpu_links.py kept                    # two of three workers reuse their pair's group after a death
    python bench/gpu_links.py rebuilds --times 200    # memory and handles left after rebuilds
    python bench/gpu_links.py pair --cpu              # over Gloo

The last line is the result as JSON. A failed assertion ends with exit code 1.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from typing import Any

import torch
from recycle_schedules import Worker

from recycle_pp.comm.gloo.group import GlooGroup
from recycle_pp.comm.groups import GroupTransport
from recycle_pp.comm.links import Links
from recycle_pp.comm.nccl.environment import ENVIRONMENT
from recycle_pp.comm.nccl.group import NcclGroup
from recycle_pp.comm.waiting import Generation, LinkBroken
from recycle_pp.execution.transports import transport_for
from recycle_pp.testing.rehearsal import Node, Rehearsal, grid
from recycle_pp.wire.messages.members import Assignment

CPU = "--cpu"
LARGE = 1 << 20  # elements of a large message
TYPES = (torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8)
PEERS = grid(2, 1)
NEIGHBOURS = grid(1, 2)
DYING = 2  # a peer of the second neighbour


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["alone", "pair", "kept", "rebuilds"])
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument(CPU, action="store_true")
    options = parser.parse_args()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["GPU_LINKS_CPU"] = "1" if options.cpu else ""
    result: dict[str, Any] = {}
    if options.what == "alone":
        result = play(grid(1, 1), alone)
    elif options.what == "pair":
        result = play(NEIGHBOURS, messages) | play(PEERS, sums) | play(PEERS, abort_in_a_sum)
    elif options.what == "kept":
        with Rehearsal(NEIGHBOURS | {DYING: Worker(1, 1)}, kept) as rehearsal:
            rehearsal.reports(3, timeout=80.0)
            rehearsal.kill(DYING)
            rehearsal.send("go", to=NEIGHBOURS)
            result = dict(sorted(rehearsal.reports(2, timeout=80.0))[0][1])
    else:
        os.environ["GPU_LINKS_TIMES"] = str(options.times)
        result = play(PEERS, rebuilds)
    print(json.dumps(result))


def play(members: Assignment, scenario: Any) -> dict[str, Any]:
    """Runs the scenario in a process for each member, and returns the report of the first one."""
    with Rehearsal(members, scenario) as rehearsal:
        return dict(sorted(rehearsal.reports(len(members), timeout=200.0))[0][1])


def alone(node: Node) -> None:
    """Tests a communicator directly, because the links of a worker without peers build none."""
    device = connect(node)
    kind: Any = GlooGroup if device.type == "cpu" else NcclGroup
    generation, group = Generation(0), kind(node.store, "0/alone", 0, 1, device, 60.0, "127.0.0.1")
    group.connect(generation, pair=False)
    for dtype in (torch.int64, torch.uint8):
        tensor = torch.full((LARGE,), 3, dtype=dtype, device=device)
        kind.wait(generation, group.backend.allreduce([tensor]))
        assert bool((tensor == 3).all()), dtype
    began = time.monotonic()
    kind.abort([group])
    node.report({"abort_ms": 1e3 * (time.monotonic() - began)})


def messages(node: Node) -> None:
    device = connect(node)
    node.links.rebuild(0, node.members, node.me)
    node.links.follow(0)
    (other,) = (member for member in node.members if member != node.me)
    node.links.connect([other])
    began = time.monotonic()
    for tag, dtype in enumerate(TYPES):
        mine = pattern(dtype, node.worker.stage, device)
        theirs = torch.empty_like(mine)
        first = node.worker.stage == 0
        steps = [lambda: node.links.send(mine, other, tag), lambda: node.links.receive(theirs, other, tag)]  # noqa: B023
        for step in steps if first else reversed(steps):
            step().wait()
        assert torch.equal(theirs, pattern(dtype, node.members[other].stage, device)), dtype
    node.report({"messages_ms": 1e3 * (time.monotonic() - began)})


def sums(node: Node) -> None:
    device = connect(node)
    node.links.rebuild(0, node.members, node.me)
    node.links.follow(0)
    for dtype in (torch.int64, torch.int32, torch.float32, torch.float64):
        tensor = pattern(dtype, node.worker.pipeline, device)
        node.links.all_reduce([tensor]).wait()
        expected = sum(pattern(dtype, worker.pipeline, device) for worker in node.members.values())
        assert torch.equal(tensor, expected), dtype  # type: ignore[arg-type]
    node.report({"sums": "exact"})


def abort_in_a_sum(node: Node) -> None:
    """One peer never joins the sum. An abort unblocks the other peer, and both build the next generation."""
    device = connect(node)
    node.links.rebuild(0, node.members, node.me)
    node.links.follow(0)
    seconds = 0.0
    if node.me == 0:
        began = time.monotonic()
        threading.Timer(1.0, node.links.abort).start()
        try:
            node.links.all_reduce([pattern(torch.int64, 0, device)]).wait()
            raise AssertionError("a sum without its peer has ended")
        except LinkBroken:
            seconds = time.monotonic() - began - 1.0
    else:
        time.sleep(1.5)
        node.links.abort()
    began = time.monotonic()
    node.links.rebuild(1, node.members, node.me)
    node.links.follow(1)
    node.links.all_reduce([pattern(torch.int64, 0, device)]).wait()
    node.report({"abort_ms": 1e3 * seconds, "rebuild_ms": 1e3 * (time.monotonic() - began)})


def kept(node: Node) -> None:
    """After the death of a peer, two neighbours exchange messages through their existing group."""
    device = connect(node)
    kind: Any = GlooGroup if device.type == "cpu" else NcclGroup
    built: list[str] = []

    def build(store: Any, prefix: str, *arguments: Any) -> Any:
        built.append(prefix)
        return kind(store, prefix, *arguments)

    build.wait, build.abort = kind.wait, kind.abort  # type: ignore[attr-defined]
    node.links = Links(GroupTransport(node.store, device, 60.0, build))  # type: ignore[arg-type]
    seconds = []
    for generation, members in enumerate((node.members, NEIGHBOURS)):
        began = time.monotonic()
        node.links.abort()
        node.links.rebuild(generation, members, node.me, 0)
        node.links.follow(generation)
        if node.me in NEIGHBOURS:
            (other,) = (member for member in NEIGHBOURS if member != node.me)
            node.links.connect([other])
            theirs = torch.empty(LARGE, device=device)
            works = [
                lambda: node.links.send(pattern(torch.float32, node.worker.stage, device), other, 0),  # noqa: B023
                lambda: node.links.receive(theirs, other, 0),  # noqa: B023
            ]
            for work in works if node.worker.stage == 0 else reversed(works):
                work().wait()
            assert torch.equal(theirs, pattern(torch.float32, NEIGHBOURS[other].stage, device))
        if node.worker.stage == 1:
            node.links.all_reduce([pattern(torch.int64, 0, device)]).wait()
        seconds.append(time.monotonic() - began)
        if generation == 0:
            node.report("ready")
            before = len(built)
            node.receive()
    assert built[before:] == [], f"built again: {built[before:]}"
    node.report({"new_ms": 1e3 * seconds[0], "kept_ms": 1e3 * seconds[1]})


def rebuilds(node: Node) -> None:
    device = connect(node)
    before: dict[str, int] = {}
    times = []
    for generation in range(int(os.environ["GPU_LINKS_TIMES"])):
        began = time.monotonic()
        node.links.abort()
        node.links.rebuild(generation, node.members, node.me)
        node.links.follow(generation)
        node.links.all_reduce([pattern(torch.int64, 0, device)]).wait()
        times.append(time.monotonic() - began)
        if generation == 3:  # not earlier, because the first generations allocate some resources permanently
            time.sleep(1.0)
            before = used()
    time.sleep(2.0)
    after = used()
    rows = {f"{name}_{when}": of[name] for when, of in (("before", before), ("after", after)) for name in of}
    node.report({**rows, "median_ms": 1e3 * sorted(times)[len(times) // 2]})


def connect(node: Node) -> torch.device:
    """Replaces the node's links with those of a job with parallel.backend=nccl."""
    cpu = bool(os.environ["GPU_LINKS_CPU"])
    device = torch.device("cpu") if cpu else torch.device("cuda", 0)
    if not cpu:
        torch.cuda.set_device(device)
    node.links.close()
    node.links = Links(transport_for("gloo" if cpu else "nccl", node.store, device, timeout=60))
    return device


def pattern(dtype: torch.dtype, seed: int, device: torch.device) -> torch.Tensor:
    return (torch.arange(LARGE, device=device) % 97 + seed).to(dtype)


def used() -> dict[str, int]:
    free, total = torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "gpu_mib": (total - free) >> 20,
    }


if __name__ == "__main__":
    main()
