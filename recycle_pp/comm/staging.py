"""Links between GPUs through host memory.

    transport = StagedTransport(TcpTransport(...), torch.device("cuda", 0))

Useful on machines without NCCL, and if workers share a GPU, because NCCL allows only one rank per GPU. A send blocks
until the ops that compute its tensor are done. Communication therefore overlaps the compute of other workers, but not
the sender's own compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from recycle_pp.wire.messages.members import Member

from .transport import Transport
from .waiting import Generation, Pending


class StagedTransport:
    """Applies `inner`, a transport for host tensors, to tensors on `device`. Copies block the calling thread."""

    def __init__(self, inner: Transport, device: torch.device):
        self._inner, self.ordered = inner, inner.ordered
        self._pinned = device.type == "cuda"  # pinned host memory makes copies to the device faster
        self.join, self.connect, self.end, self.close = inner.join, inner.connect, inner.end, inner.close
        self.received = inner.received

    def send(self, generation: Generation, tensor: Tensor, to: Member, tag: int) -> Pending:
        return self._inner.send(generation, self._room(tensor).copy_(tensor), to, tag)

    def receive(self, generation: Generation, tensor: Tensor, frm: Member, tag: int) -> Pending:
        host = self._room(tensor)
        return _then_copy(self._inner.receive(generation, host, frm, tag), [tensor], [host])

    def all_reduce(self, generation: Generation, tensors: Sequence[Tensor]) -> Pending:
        return self._in_place(tensors, lambda hosts: self._inner.all_reduce(generation, hosts))

    def reduce(self, generation: Generation, tensors: Sequence[Tensor], to: Member) -> Pending:
        return self._in_place(tensors, lambda hosts: self._inner.reduce(generation, hosts, to))

    def broadcast(self, generation: Generation, tensors: Sequence[Tensor], source: Member) -> Pending:
        return self._in_place(tensors, lambda hosts: self._inner.broadcast(generation, hosts, source))

    def _in_place(self, tensors: Sequence[Tensor], operation: Callable[[list[Tensor]], Pending]) -> Pending:
        hosts = [self._room(tensor).copy_(tensor) for tensor in tensors]
        return _then_copy(operation(hosts), tensors, hosts)

    def _room(self, tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=self._pinned)


def _then_copy(pending: Pending, tensors: Sequence[Tensor], hosts: Sequence[Tensor]) -> Pending:
    """A pending operation that waits for `pending` and then copies `hosts` to `tensors`. It copies in the waiting
    thread, and thus on that thread's stream.

    An aborted operation does not change the tensors."""

    def finish() -> None:
        pending.wait()
        for tensor, host in zip(tensors, hosts, strict=True):
            tensor.copy_(host)

    return Pending(finish, pending.arrived, pending.lacks)
