"""Measures latency and bandwidth of this worker's links over the transport that carries its tensors.

    found = measure(links, me, {"node1": 5}, device, waits)     # {"node1": (0.00012, 1.1e9)}

The executor's thread calls `measure` before the first op of a generation, when the links are idle.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from recycle_pp.comm.groups import meetings
from recycle_pp.comm.links import Links
from recycle_pp.timing import round_trips
from recycle_pp.wire.messages.members import Member

from .device import finisher

TAG = 2**25 - 1  # the largest tag of TCP, far above those of a step's tensors
OVER = -1  # header that ends the measurement of a pair


def measure(
    links: Links,
    me: Member,
    partners: Mapping[str, Member],
    device: torch.device,
    waits: Callable[[Member], None] = lambda partner: None,
) -> dict[str, tuple[float, float]]:
    """Measures the links to the partners. Returns key -> (one-way seconds, bytes per second) for each partner in the
    next stage. Partners in the previous stage measure their own links to this worker.

    partners  key -> member of a neighbouring stage
    waits     called with the partner before each exchange, to report the wait

    Each partner must call `measure` in the same generation, with this member among its own partners. All members
    measure the pairs in the same order (`meetings`), which prevents a deadlock. Blocks until all pairs are measured.
    Raises LinkBroken if the generation ends first.
    """
    links.connect(partners.values())
    keys = {member: key for key, member in partners.items()}
    found = {}
    for here, there in meetings(me, keys, links.members):
        waits(there if here == me else here)
        if here == me:
            found[keys[there]] = _Asker(links, there, device).measure()
        else:
            _answer(links, here, device)
    return found


class _Asker:
    def __init__(self, links: Links, peer: Member, device: torch.device) -> None:
        self._links, self._peer, self._device, self._finish = links, peer, device, finisher(device)

    def measure(self) -> tuple[float, float]:
        link = round_trips.measure(self._ask)
        _send(self._links, self._peer, _header(OVER, self._device))
        return link

    def _ask(self, size: int) -> float:
        """Seconds from the start of sending a message of `size` bytes until its small answer has arrived."""
        header, payload = _header(size, self._device), _bytes(size, self._device)
        self._finish()
        begun = time.perf_counter()
        _send(self._links, self._peer, header)
        if size:
            _send(self._links, self._peer, payload)
        _receive(self._links, self._peer, header)
        self._finish()
        return time.perf_counter() - begun


def _answer(links: Links, peer: Member, device: torch.device) -> None:
    header = _header(0, device)
    while True:
        _receive(links, peer, header)
        size = int(header.item())
        if size == OVER:
            return
        if size:
            _receive(links, peer, _bytes(size, device))
        _send(links, peer, header)


def _send(links: Links, peer: Member, tensor: Tensor) -> None:
    links.send(tensor, peer, TAG).wait()


def _receive(links: Links, peer: Member, tensor: Tensor) -> None:
    links.receive(tensor, peer, TAG).wait()


def _header(size: int, device: torch.device) -> Tensor:
    return torch.tensor([size], dtype=torch.int64, device=device)


def _bytes(size: int, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)
