"""Sums and broadcasts among a few workers, built from messages, so that no group must be rebuilt after a death.

    all_reduce(tensors, peers, slot)        # in place; peers[k] is the route to worker k, None for this worker
    reduce(tensors, peers, root, slot)      # only worker `root` receives the sums
    broadcast(tensors, peers, source, slot) # copies the tensors of worker `source`

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
PIECE = 1 << 22  # bytes; maximum size of a message of `all_reduce`


class Message(Protocol):
    def wait(self) -> None: ...


class Route(Protocol):
    """The route to one peer. Messages with the same slot arrive in the order in which they were sent. After a
    message's `wait`, the caller may write to a sent tensor and read a received tensor."""

    def send(self, tensor: Tensor, slot: int) -> Message: ...
    def receive(self, tensor: Tensor, slot: int) -> Message: ...


def all_reduce(tensors: Sequence[Tensor], peers: Sequence[Route | None], slot: int) -> None:
    """Sums contiguous tensors in place. Worker k sums part k of each tensor, then all workers exchange their sums.

    Each of the n workers sends 2 (n-1)/n of the tensors' bytes, the minimum for any all-reduce (reduce-scatter and
    all-gather; Thakur, Rabenseifner and Gropp, 2005). Parts are sent in pieces of at most PIECE bytes, and a worker
    sends the sum of a piece as soon as it has all contributions. The two exchanges and the additions thus overlap.
    Small tensors are sent whole, and every worker sums them. Each element is summed in the order of the workers, not in
    the order of arrival, so the same workers always get the same bits.
    """
    me = list(peers).index(None)
    small = [tensor for tensor in tensors if 0 < tensor.nbytes <= SMALL]
    parts = [_parts(tensor, len(peers)) for tensor in tensors if tensor.nbytes > SMALL]
    by_worker = [[piece for part in parts for piece in _pieces(part[k])] for k in range(len(peers))]
    mine = [*small, *by_worker[me]]  # the pieces that this worker sums
    inboxes = [mine if route is None else _like(mine) for route in peers]
    others = [(k, route) for k, route in enumerate(peers) if route is not None]
    contributions = [[route.receive(piece, slot) for piece in inboxes[k]] for k, route in others]
    whole = [route.send(tensor, slot) for _, route in others for tensor in small]
    messages = [route.send(piece, slot) for k, route in others for piece in by_worker[k]]
    # Each sum overwrites this worker's contribution, which the sender of the sum has already received.
    messages += [route.receive(piece, slot) for k, route in others for piece in by_worker[k]]
    _wait(whole)  # because the sums below overwrite the small tensors
    for number, (out, *received) in enumerate(zip(mine, *inboxes, strict=True)):
        _wait([arriving[number] for arriving in contributions])
        _add(out, received)
        if number >= len(small):
            messages += [route.send(out, slot) for _, route in others]
    _wait(messages)


def reduce(tensors: Sequence[Tensor], peers: Sequence[Route | None], root: int, slot: int) -> None:
    """Like `all_reduce`, but only worker `root` receives the sums. The tensors of the other workers do not change."""
    route = peers[root]
    if route is not None:
        _wait([route.send(tensor, slot) for tensor in tensors if tensor.numel()])
        return
    inboxes = [tensors if peer is None else _like(tensors) for peer in peers]
    messages = []
    for peer, inbox in zip(peers, inboxes, strict=True):
        messages += [peer.receive(tensor, slot) for tensor in inbox if peer is not None and tensor.numel()]
    _wait(messages)
    for out, *contributions in zip(tensors, *inboxes, strict=True):
        _add(out, contributions)


def broadcast(tensors: Sequence[Tensor], peers: Sequence[Route | None], source: int, slot: int) -> None:
    """Copies the tensors of worker `source` to all other workers."""
    route = peers[source]
    if route is None:
        _wait([other.send(t, slot) for other in peers if other is not None for t in tensors if t.numel()])
    else:
        _wait([route.receive(tensor, slot) for tensor in tensors if tensor.numel()])


def _add(out: Tensor, contributions: Sequence[Tensor]) -> None:
    """Sums the contributions into `out`, in their order. One of them is `out` itself. All may be overwritten."""
    total = contributions[0]
    for contribution in contributions[1:-1]:
        total += contribution
    torch.add(total, contributions[-1], out=out)


def _parts(tensor: Tensor, count: int) -> list[Tensor]:
    """Splits a contiguous tensor into `count` flat views of almost equal length. Some are empty if the tensor is
    short."""
    flat = tensor.view(-1)
    bounds = [flat.numel() * k // count for k in range(count + 1)]
    return [flat[start:end] for start, end in itertools.pairwise(bounds)]


def _pieces(flat: Tensor) -> Sequence[Tensor]:
    """Splits a flat tensor into views of at most PIECE bytes. There are none if it is empty."""
    return flat.split(PIECE // flat.itemsize) if flat.numel() else ()


def _like(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Uninitialised tensors of the same shapes. Pinned if the originals are: torch reuses pinned memory, but allocates
    other memory from the system each time."""
    return [torch.empty_like(tensor, pin_memory=tensor.is_pinned()) for tensor in tensors]


def _wait(messages: Sequence[Message]) -> None:
    for message in messages:
        message.wait()
