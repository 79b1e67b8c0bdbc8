"""One NCCL communicator whose operations end when their generation does. Nothing of this has run on a GPU yet.

    group = NcclGroup(store, "7/0.1-1.2", rank, size, device, timeout)  # waits for nobody
    works = group.connect(pair=True)                                    # blocks until everybody calls it
    work = group.backend.send([tensor], peer, 0)                        # without tags: in the order of the calls
    NcclGroup.wait(generation, work)                                    # LinkBroken as soon as the generation ends
    NcclGroup.abort(groups)                                             # from any thread

torch's `work.wait()` lets the GPU wait and the host run on: after an abort, the host would take ops behind a message
that never came for done. So here the host waits, and only then the stream.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from recycle_pp.comm.torch_internals import connect_nccl, nccl_backend
from recycle_pp.comm.waiting import Generation

from .environment import NONBLOCKING_SECONDS

POLL_SECONDS = 2e-5
ABORT_SECONDS = NONBLOCKING_SECONDS + 10.0  # whoever connects holds a lock that an abort needs


class NcclGroup:
    """device: of all its tensors. timeout: seconds. interface: not used, NCCL goes by NCCL_SOCKET_IFNAME."""

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
        self._rank, self._device = rank, device
        self.backend: Any = nccl_backend(dist.PrefixStore(prefix, store), rank, size, timeout)

    def connect(self, pair: bool) -> list[Any]:
        """Uses the group once, both ways (a pair sends, others sum): NCCL connects at the first use, and blocks the
        host until all members have come, NONBLOCKING_SECONDS at most. Returns what has to be waited for.

        On a stream of its own, as the default one computes; of high priority, as those of normal priority are the
        groups'.
        """
        with torch.cuda.stream(torch.cuda.Stream(self._device, priority=-1)):
            token = torch.zeros(1, device=self._device)
            connect_nccl(self.backend, self._device)
            if not pair:
                return [self.backend.allreduce([token])]
            ways = [self.backend.send, self.backend.recv]
            return [way([token], 1 - self._rank, 0) for way in (ways if self._rank == 0 else reversed(ways))]

    @staticmethod
    def wait(generation: Generation, work: Any) -> None:
        while not generation.attempt(work.is_completed):  # also when aborted, but the generation ends before that
            time.sleep(POLL_SECONDS)
        generation.attempt(work.wait)  # raises what NCCL has found; torch lets go of the tensors

    @staticmethod
    def abort(groups: Sequence[NcclGroup]) -> None:
        """Aborts all groups at the same time: an abort waits for what runs on the GPU, which may be another group's
        hanging operation (pytorch#119797). TimeoutError if one hangs all the same: its GPU is of no more use to this
        process, nor the process to the job. What one raises goes to threading.excepthook: a worker ends by either."""
        threads = [threading.Thread(target=group.backend.abort, name="nccl-abort", daemon=True) for group in groups]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + ABORT_SECONDS
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            raise TimeoutError(f"NCCL has not aborted its communicators in {ABORT_SECONDS:g} s")
