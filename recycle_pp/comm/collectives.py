"""Sums and broadcasts among a few workers, built from messages. So no group must be rebuilt after a death.

    all_reduce(tensors, peers, slot)        # in place; peers[k] is the route to worker k, None for this worker
    reduce(tensors, peers, root, slot)      # only for worker `root`
    broadcast(tensors, peers, source, slot)

Every worker calls the function with the same shapes and dtypes, the same order of workers, and the same slot. Tensors
are on the CPU and may have any dtype. No other message between the same two workers may use the slot. A call blocks
until all workers have called the function, or until a route raises, so run it in a thread. After an error the contents
of the tensors are undefined.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

SMALL = 1 << 16  # bytes; up to this size, one exchange of whole tensors is faster than two exchanges of parts


class Message(Protocol):
    def wait(self) -> None: ...


class Route(Protocol):
    """The route to one peer. Messages with the same slot arrive in the order in which they were sent. After a
    message's `wait`, the caller may write to a sent tensor and read a received tensor."""

    def send(self, tensor: Tensor, slot: int) -> Message: ...
    def receive(self, tensor: Tensor, slot: int) -> Message: ...


def all_reduce(tensors: Sequence[Tensor], peers: Sequence[Route | None], slot: int) -> None:
    """Sums contiguous tensors in place. Worker k sums part k of each tensor, then all workers exchange their sums.

    Each of the n workers sends 2 (n-1)/n of the tensors' bytes, the minimum for any all-reduce. There are two exchanges
    (reduce-scatter and all-gather; Thakur, Rabenseifner and Gropp, 2005). Small tensors are sent whole in the first
    exchange, and every worker sums them. Each element is summed in the order of the workers, not in the order of
    arrival, so the same workers always get the same bits.
    """
    me = list(peers).index(None)
    small = [tensor for tensor in tensors if tensor.nbytes <= SMALL]
    parts = [_parts(tensor, len(peers)) for tensor in tensors if tensor.nbytes > SMALL]
    by_worker = [[part[k] for part in parts] for k in range(len(peers))]
    mine = [*small, *by_worker[me]]  # the parts that this worker sums
    inboxes = [mine if route is None else [torch.empty_like(tensor) for tensor in mine] for route in peers]
    _exchange(peers, slot, [[*small, *pieces] for pieces in by_worker], inboxes)
    _sum(mine, inboxes)
    if parts:
        _exchange(peers, slot, [by_worker[me]] * len(peers), by_worker)


def reduce(tensors: Sequence[Tensor], peers: Sequence[Route | None], root: int, slot: int) -> None:
    """Like `all_reduce`, but only worker `root` receives the sums. The tensors of the other workers do not change."""
    route = peers[root]
    if route is not None:
        _wait([route.send(tensor, slot) for tensor in tensors if tensor.numel()])
        return
    inboxes = [tensors if peer is None else [torch.empty_like(tensor) for tensor in tensors] for peer in peers]
    _exchange(peers, slot, [[]] * len(peers), inboxes)
    _sum(tensors, inboxes)


def broadcast(tensors: Sequence[Tensor], peers: Sequence[Route | None], source: int, slot: int) -> None:
    """Copies the tensors of worker `source` to all other workers."""
    route = peers[source]
    if route is None:
        _wait([other.send(t, slot) for other in peers if other is not None for t in tensors if t.numel()])
    else:
        _wait([route.receive(tensor, slot) for tensor in tensors if tensor.numel()])


def _sum(outs: Sequence[Tensor], inboxes: Sequence[Sequence[Tensor]]) -> None:
    """Sums the inboxes into `outs`, in the order of the workers. One inbox is `outs` itself. All inboxes may be
    overwritten."""
    for out, *contributions in zip(outs, *inboxes, strict=True):
        total = contributions[0]
        for contribution in contributions[1:-1]:
            total += contribution
        torch.add(total, contributions[-1], out=out)


def _parts(tensor: Tensor, count: int) -> list[Tensor]:
    """`count` views of almost equal length. Some are empty if the tensor is short."""
    flat = tensor.view(-1)
    bounds = [flat.numel() * k // count for k in range(count + 1)]
    return [flat[start:end] for start, end in itertools.pairwise(bounds)]


def _exchange(
    peers: Sequence[Route | None], slot: int, outgoing: Sequence[Sequence[Tensor]], incoming: Sequence[Sequence[Tensor]]
) -> None:
    """Sends outgoing[k] to worker k and fills incoming[k] with the tensors of worker k. Returns when all are done."""
    messages = []
    for route, tensors in zip(peers, incoming, strict=True):
        messages += [route.receive(tensor, slot) for tensor in tensors if route is not None and tensor.numel()]
    for route, tensors in zip(peers, outgoing, strict=True):
        messages += [route.send(tensor, slot) for tensor in tensors if route is not None and tensor.numel()]
    _wait(messages)


def _wait(messages: Sequence[Message]) -> None:
    for message in messages:
        message.wait()
