"""An NCCL communicator whose operations end with their generation.

    group = NcclGroup(store, "7/0.1-1.2", rank, size, device, timeout)  # does not wait
    group.connect(generation, pair=True)                                # blocks until every member calls it
    work = group.backend.send([tensor], peer, 0)                        # no tags: messages match in the order of calls
    NcclGroup.wait(generation, work)                                    # raises LinkBroken when the generation ends
    NcclGroup.abort(groups)                                             # from any thread

Not only the stream but also the host waits for each operation. Otherwise an op would count as done after an abort, even
if it needed a message that never arrived.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from recycle_pp.comm.waiting import Generation

from .communicator import Communicator
from .gpu_stream import GpuStream
from .library import library

POLL_SECONDS = 2e-5
READY_SECONDS = 1e-3  # seconds between two polls of a communicator that is being built
ABORT_SECONDS = 10.0
WARM = (1, 1 << 22)  # number of elements of the sums in `connect`; NCCL uses different algorithms for the two lengths
SUMMED = (torch.float32, torch.float64, torch.int32, torch.int64)  # dtypes of the trainer's sums


class NcclGroup:
    """Implements `comm.groups.Group` with one communicator.

    device     the GPU that holds all tensors of the operations
    timeout    unused, because the coordinator decides about deaths
    interface  unused, because NCCL reads NCCL_SOCKET_IFNAME
    """

    def __init__(
        self,
        store: dist.Store,
        prefix: str,
        rank: int,
        size: int,
        device: torch.device,
        timeout: float,
        interface: str = "127.0.0.1",
    ):
        self._store, self._key = store, f"{prefix}/nccl"
        self._rank, self._size, self._device = rank, size, device
        self.backend: Any = Communicator(library(), GpuStream(device), rank, size)
        if rank == 0:
            store.set(self._key, library().identity())  # type: ignore[arg-type]

    def connect(self, generation: Generation, pair: bool) -> None:
        """Runs each kind of operation for which the group will be used. NCCL connects an algorithm at its first use,
        which blocks until all members take part.

        pair: whether the members are two workers of different stages, which send to each other. Otherwise the members
        are peers, which sum and broadcast.

        No lock is held between two polls, so an abort can end the wait at any time.

        Raises ArithmeticError if a sum is wrong. An NCCL build without the kernel of a dtype returns success and adds
        nothing."""
        generation.attempt(lambda: self.backend.open(self._store.get(self._key)))
        while not generation.attempt(self.backend.ready):
            time.sleep(READY_SECONDS)
        for work in self._exchange(generation) if pair else self._sums(generation):
            self.wait(generation, work)
        if not pair:
            self._check_sums(generation)

    def _exchange(self, generation: Generation) -> list[Any]:
        token, peer = torch.zeros(1, device=self._device), 1 - self._rank
        ways = [self.backend.send, self.backend.recv]
        return [generation.attempt(partial(way, [token], peer, 0)) for way in (ways if peer else reversed(ways))]

    def _sums(self, generation: Generation) -> list[Any]:
        root = SimpleNamespace(rootRank=0)
        works = []
        for tensor in [torch.zeros(elements, device=self._device) for elements in WARM]:
            works.append(generation.attempt(partial(self.backend.allreduce, [tensor])))
            works.append(generation.attempt(partial(self.backend.reduce, [tensor], root)))
            works.append(generation.attempt(partial(self.backend.broadcast, [tensor], root)))
        return works

    def _check_sums(self, generation: Generation) -> None:
        ones = [torch.ones(1, dtype=dtype, device=self._device) for dtype in SUMMED]
        for work in [generation.attempt(partial(self.backend.allreduce, [one])) for one in ones]:
            self.wait(generation, work)
        if wrong := [str(one.dtype).removeprefix("torch.") for one in ones if one.item() != self._size]:
            raise ArithmeticError(f"NCCL computes wrong sums of {' and '.join(wrong)}; its build may lack these types")

    @staticmethod
    def wait(generation: Generation, work: Any) -> None:
        # `is_completed` may be true after an abort, but the generation ends before the abort, so `attempt` raises.
        while not generation.attempt(work.is_completed):
            time.sleep(POLL_SECONDS)
        generation.attempt(work.wait)

    @staticmethod
    def abort(groups: Sequence[NcclGroup]) -> None:
        """Aborts all groups in parallel. An abort waits for running kernels, and these may be hanging operations of
        other groups (pytorch#119797).

        Raises TimeoutError if an abort still hangs ABORT_SECONDS after the GPU has done the compute for which the
        operations wait, because this process can then no longer use its GPU and must end. The compute may take longer
        on a healthy GPU.

        Any other exception of an abort goes to threading.excepthook. In both cases the worker exits."""
        threads = [threading.Thread(target=group.backend.abort, name="nccl-abort", daemon=True) for group in groups]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads) and not all(group.backend.is_due for group in groups):
            time.sleep(READY_SECONDS)
        deadline = time.monotonic() + ABORT_SECONDS
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            raise TimeoutError(f"NCCL did not abort its communicators within {ABORT_SECONDS:g} s")
