"""Latency and bandwidth of this worker's links, measured over the very transport that its tensors take.

    found = measure(links, me, {"node1": Worker(1, 1)}, device, waits)      # {"node1": (0.00012, 1.1e9)}

In the executor's thread, before the generation's first op: nothing else is under way then. A link within a data centre
takes 10 ms, one with a round trip of 100 ms 0.5 s.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
from recycle_schedules import Worker
from torch import Tensor

from recycle_pp.comm.groups import meetings
from recycle_pp.comm.links import Links

from .device import finisher

TAG = 2**25 - 1  # the largest that TCP allows; tensors of a step have far smaller ones
ROUNDS, ROUND_SECONDS = 8, 0.02  # round trips of a few bytes: so many, or as many as that time allows, at least two
SIZES = (1 << 16, 1 << 19, 1 << 22)  # bytes of the messages that measure the bandwidth, each sent `TRIES` times
TRIES = 3
LONG = 0.005  # seconds: no larger message follows one that took longer
LEAST = 2e-5  # seconds: shorter differences between two round trips are noise

OVER = -1


def measure(
    links: Links,
    me: Worker,
    partners: Mapping[str, Worker],
    device: torch.device,
    waits: Callable[[Worker], None] = lambda partner: None,
) -> dict[str, tuple[float, float]]:
    """Seconds one way and bytes a second to the partners of the next stage, by the partner's key; for those of the
    stage before, this worker is the other end.

    Each partner calls it in the same generation with this worker among its partners, who are all of a stage beside its
    own. Blocks until all have; LinkBroken when the generation ends meanwhile. Everybody keeps to one order of all pairs
    (`meetings`), so there is always a pair that can go on. waits: called before each exchange, for the watch."""
    links.connect(partners.values())
    keys = {worker: key for key, worker in partners.items()}
    found = {}
    for here, there in meetings(me, keys):
        waits(there if here == me else here)
        if here == me:
            found[keys[there]] = _Asker(links, there, device).measure()
        else:
            _answer(links, here, device)
    return found


class _Asker:
    def __init__(self, links: Links, peer: Worker, device: torch.device) -> None:
        self._links, self._peer, self._device, self._finish = links, peer, device, finisher(device)

    def measure(self) -> tuple[float, float]:
        begun = time.perf_counter()
        trips: list[float] = []
        while len(trips) < 2 or (len(trips) < ROUNDS and time.perf_counter() - begun < ROUND_SECONDS):
            trips.append(self._ask(0))
        trip = min(trips)
        bandwidth = 0.0
        for size in SIZES:
            seconds = min(self._ask(size) for _ in range(TRIES))
            bandwidth = max(bandwidth, size / max(seconds - trip, LEAST))  # a busy machine only makes it less
            if seconds > LONG:
                break
        _send(self._links, self._peer, _header(OVER, self._device))
        return trip / 2, bandwidth

    def _ask(self, size: int) -> float:
        """Seconds from a message of `size` bytes to its answer of a few."""
        header, payload = _header(size, self._device), _bytes(size, self._device)
        self._finish()
        begun = time.perf_counter()
        _send(self._links, self._peer, header)
        if size:
            _send(self._links, self._peer, payload)
        _receive(self._links, self._peer, header)
        self._finish()
        return time.perf_counter() - begun


def _answer(links: Links, peer: Worker, device: torch.device) -> None:
    header = _header(0, device)
    while True:
        _receive(links, peer, header)
        size = int(header.item())
        if size == OVER:
            return
        if size:
            _receive(links, peer, _bytes(size, device))
        _send(links, peer, header)


def _send(links: Links, peer: Worker, tensor: Tensor) -> None:
    links.send(tensor, peer, TAG).wait()


def _receive(links: Links, peer: Worker, tensor: Tensor) -> None:
    links.receive(tensor, peer, TAG).wait()


def _header(size: int, device: torch.device) -> Tensor:
    return torch.tensor([size], dtype=torch.int64, device=device)


def _bytes(size: int, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)
