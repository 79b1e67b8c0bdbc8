"""Cost of donating a large state, and time until a joiner has received it.

    python bench/rejoin.py [--gigabytes 4] [--op 0.02] [--ops 24]

The bench has two processes on this machine. The donor "trains": its ops sleep, and a step ends with a real AdamW step
of its whole state. Meanwhile `recycle_pp.state.donations` feeds a joiner. The bench prints:

- the time from the commit at which a joiner was requested until it is a peer;
- the longest time that the donor's optimizer waited for the donation;
- the memory of the donation in addition to the state and the gradients;
- whether the joiner ended with the donor's bits.

The state goes through one loopback connection. Its rate bounds the time and is printed too.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import resource
import threading
import time
from types import SimpleNamespace
from typing import Any

import torch
from recycle_schedules import Worker
from results import save

from recycle_pp.config.settings import Optimizer, Run, Settings
from recycle_pp.numerics import torch_operations
from recycle_pp.numerics.gradients import Reduced
from recycle_pp.numerics.layer_tensors import LayerTensors
from recycle_pp.numerics.optimizer import StageOptimizer
from recycle_pp.state.donations import Donations
from recycle_pp.state.follow import Following
from recycle_pp.wire.messages.lifecycle import Donate, Expect, Synced
from recycle_pp.wire.messages.steps import Commit
from recycle_pp.wire.messages.table import Message
from recycle_pp.wire.messages.units import packed

GB = 1e9
TOKEN = "a token of a job of this machine alone"


def vectors(matrices: int) -> LayerTensors:
    """A stage that computes nothing. It has `matrices` matrices of 1024 x 1024 in one layer."""
    shapes = {f"layers.{k}.weight": (1024, 1024) for k in range(matrices)}
    found = LayerTensors(
        settings(), shapes, [0] * matrices, torch_operations, torch.device("cpu"), depth=1, cut=lambda *_: None
    )
    found.flat.parts[0].fill_(1.0)
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--gigabytes", type=float, default=4.0, help="size of the state: parameters and both moments")
    options.add_argument("--op", type=float, default=0.02, help="seconds of an op")
    options.add_argument("--ops", type=int, default=24, help="ops in a step")
    given = options.parse_args()
    matrices = max(1, round(given.gigabytes * GB / 12 / (1 << 20)))
    ours, theirs = multiprocessing.Pipe()
    joiner = multiprocessing.get_context("fork").Process(target=join, args=(theirs, matrices), daemon=True)
    joiner.start()
    donor = Donor(matrices)
    alone = [donor.step(given.op, given.ops) for _ in range(3)]
    before = peak()
    begun, synced, during = donor.donate(ours.recv()), None, []
    while synced is None:
        during.append(donor.step(given.op, given.ops))
        synced = ours.recv() if ours.poll() else None
    longest = max(donor.pauses)
    donor.step(given.op, given.ops)
    time.sleep(3.0)
    ours.send("digest")
    row = {
        "state_bytes": 12 * donor.stage.layout.size,
        "synced_seconds": synced - begun,
        "bytes_per_second": 12 * donor.stage.layout.size / (synced - begun),
        "step_seconds_alone": min(alone),
        "step_seconds_median": sorted(during)[len(during) // 2],
        "longest_wait_of_the_optimizer_seconds": longest,
        "extra_peak_bytes": peak() - before,
        "same_bits": ours.recv() == digest(donor.optimizer),
    }
    print(
        f"{row['state_bytes'] / GB:.1f} GB of state: a peer after {row['synced_seconds']:.1f} s "
        f"({row['bytes_per_second'] / GB:.2f} GB/s); the donor's steps {row['step_seconds_median']:.2f} s "
        f"(alone {row['step_seconds_alone']:.2f} s), its optimizer waited {1e3 * longest:.1f} ms at most, "
        f"{row['extra_peak_bytes'] / GB:.2f} GB more at the peak; same bits: {row['same_bits']}"
    )
    save("rejoin.json", row)


class Donor:
    def __init__(self, matrices: int) -> None:
        self.stage = vectors(matrices)
        self.optimizer = StageOptimizer(settings(), self.stage)
        self.donations = Donations(
            self.optimizer, self.stage.gradients, TOKEN, lambda moment, step: None, lambda message: None
        )
        self.number, self.pauses = 0, [0.0]
        self._lock = self.optimizer._lock

    def step(self, op: float, ops: int) -> float:
        """Runs a step. Returns its seconds."""
        begun = time.monotonic()
        for _ in range(ops):
            time.sleep(op)
        flat = torch.full((self.stage.layout.size,), 1.0 / (1 + self.number))
        reduced = Reduced(flat, torch.ones(1).long(), torch.zeros(1), [], True)
        asked = time.monotonic()
        with self._lock:  # the optimizer waits for this lock
            self.pauses.append(time.monotonic() - asked)
        self.optimizer.step(reduced, self.number)
        self.donations.committed(Commit(generation=0, step=self.number, scale=1.0, norm=0.0, loss=0.0), reduced)
        self.number += 1
        return time.monotonic() - begun

    def donate(self, address: Any) -> float:
        ids = self.stage.layout.ids
        self.donations.asked(Donate(0, Worker(0, 0), session=1, address=address, units=packed(ids), of=len(ids)))
        return time.monotonic()


def join(pipe: Any, matrices: int) -> None:
    stage: Any = vectors(matrices)
    optimizer = StageOptimizer(settings(), stage)
    participant: Any = SimpleNamespace(
        generation=-1, announced=None, caught_up=lambda step, units: None, followed=lambda step, units: None
    )
    lock = threading.RLock()
    joining = Following(stage, optimizer, participant, lock, TOKEN, "127.0.0.1", lambda moment, step: None)
    reported: list[int] = []

    def send(message: Message) -> None:
        if isinstance(message, Synced) and not reported:
            reported.append(message.step)
            pipe.send(time.monotonic())

    joining.start(send)
    joining.expect(Expect(session=1, layers=[0]))
    pipe.send(joining.address)
    pipe.recv()
    pipe.send(digest(optimizer))


def settings() -> Settings:
    return Settings(optimizer=Optimizer(warmup=0), run=Run(steps=1 << 20))


def digest(optimizer: StageOptimizer) -> str:
    total = hashlib.sha256()
    for flat in optimizer.held[0].state:
        total.update(flat.numpy().data)
    return total.hexdigest()


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
