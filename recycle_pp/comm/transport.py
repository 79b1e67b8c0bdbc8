"""The interface of a back end of `Links`. The back ends are TCP (`comm.tcp`), Gloo or NCCL groups (`comm.groups`),
and TCP or Gloo between GPUs through host memory (`comm.staging`). `execution.transports` selects one for a job.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from torch import Tensor

from recycle_pp.wire.messages.members import Assignment, Member

from .waiting import Generation, Pending


class Transport(Protocol):
    """Every operation belongs to a generation prepared by `join`, and raises LinkBroken after the generation has ended.

    Tensors are contiguous and on the transport's device. Operations may be started from any thread and return without
    waiting for a peer. `Links` describes the arguments.
    """

    ordered: bool  # see `Links.ordered`

    def join(self, generation: Generation, members: Assignment, me: Member, base: int) -> None:
        """Prepares the generation. Blocks until all members can be reached, or until the generation ends."""

    def connect(self, generation: Generation, members: Collection[Member]) -> None:
        """Prepares messages with these members. Blocks until they can be exchanged, or until the generation ends."""

    def send(self, generation: Generation, tensor: Tensor, to: Member, tag: int) -> Pending: ...
    def receive(self, generation: Generation, tensor: Tensor, frm: Member, tag: int) -> Pending: ...
    def all_reduce(self, generation: Generation, tensors: Sequence[Tensor]) -> Pending: ...
    def reduce(self, generation: Generation, tensors: Sequence[Tensor], to: Member) -> Pending: ...
    def broadcast(self, generation: Generation, tensors: Sequence[Tensor], source: Member) -> Pending: ...

    def received(self) -> int | None:
        """Bytes that the present connections have received, including incomplete messages; None: unknown (groups)."""

    def end(self, over: Sequence[Generation]) -> None:
        """Wakes operations of these generations that are blocked in the back end. Frees the generations' resources."""

    def close(self, timeout: float) -> None:
        """Closes all connections. Blocks for at most `timeout` seconds."""
