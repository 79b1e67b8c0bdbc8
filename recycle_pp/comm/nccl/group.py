"""One NCCL communicator whose operations end together with their generation. Not yet run on a GPU.

    group = NcclGroup(store, "7/0.1-1.2", rank, size, device, timeout)  # does not wait
    works = group.connect(pair=True)                                    # blocks until every member calls it
    work = group.backend.send([tensor], peer, 0)                        # no tags: messages match in order of the calls
    NcclGroup.wait(generation, work)                                    # LinkBroken as soon as the generation ends
    NcclGroup.abort(groups)                                             # from any thread

torch's `work.wait()` makes only the stream wait, and the host continues. If the message never arrives, the host would
count the following ops as done after an abort. So `NcclGroup.wait` makes first the host wait, then the stream.
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
ABORT_SECONDS = NONBLOCKING_SECONDS + 10.0  # includes the wait for a lock that a connecting thread holds


class NcclGroup:
    """
    device     the GPU that holds all tensors of the operations
    timeout    seconds
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
        self._rank, self._device = rank, device
        self.backend: Any = nccl_backend(dist.PrefixStore(prefix, store), rank, size, timeout)

    def connect(self, pair: bool) -> list[Any]:
        """Uses the group once in each direction: a pair sends and receives, larger groups sum. Returns operations to
        wait for. NCCL connects at the first use, and blocks the host until all members do the same, for at most
        NONBLOCKING_SECONDS.

        Runs on a separate stream, because the default stream computes. The stream has high priority, because the groups
        use the streams of normal priority.
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
        # After an abort `is_completed` is true too, but the generation ends before the abort, so `attempt` raises.
        while not generation.attempt(work.is_completed):
            time.sleep(POLL_SECONDS)
        generation.attempt(work.wait)  # raises NCCL's errors, and lets torch release the tensors

    @staticmethod
    def abort(groups: Sequence[NcclGroup]) -> None:
        """Aborts all groups in parallel, because an abort waits for running kernels, and such a kernel may be a hanging
        operation of another group (pytorch#119797).

        TimeoutError if an abort hangs nevertheless: this process cannot use its GPU any more and must end. Other
        exceptions go to threading.excepthook. Both end the worker."""
        threads = [threading.Thread(target=group.backend.abort, name="nccl-abort", daemon=True) for group in groups]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + ABORT_SECONDS
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            raise TimeoutError(f"NCCL has not aborted its communicators in {ABORT_SECONDS:g} s")
