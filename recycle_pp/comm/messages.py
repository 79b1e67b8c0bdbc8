"""Several tensors of any dtypes as one message of bytes.

    message = pack([x, mask])                   # uint8; a single contiguous tensor is not copied
    x, mask = unpack(buffer, specs)             # views of the received bytes
    buffer = room(specs, device)                # memory to receive such a message

All tensors that a stage sends to another stage for a micro-batch form one message. It has one tag and a size that both
sides know in advance.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from .tensor_bytes import ALIGNMENT, aligned_bytes


class Spec(Protocol):
    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> torch.dtype: ...


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """The concatenated tensors, each starting at a multiple of `ALIGNMENT` bytes."""
    pieces = [_bytes(tensor) for tensor in tensors]
    if len(pieces) == 1:
        return pieces[0]
    message = torch.zeros(sum(_padded(piece.numel()) for piece in pieces), dtype=torch.uint8, device=pieces[0].device)
    at = 0
    for piece in pieces:
        message[at : at + piece.numel()] = piece
        at += _padded(piece.numel())
    return message


def room(specs: Sequence[Spec], device: torch.device) -> Tensor:
    """Uninitialised memory for a packed message of tensors with these specs, at a multiple of `ALIGNMENT` bytes."""
    sizes = [_size(spec) for spec in specs]
    size = sizes[0] if len(sizes) == 1 else sum(map(_padded, sizes))
    return aligned_bytes(size, device)


def unpack(message: Tensor, specs: Sequence[Spec]) -> list[Tensor]:
    tensors, at = [], 0
    for spec in specs:
        piece = message[at : at + _size(spec)]
        tensors.append(piece.view(spec.dtype).view(tuple(spec.shape)))
        at += _padded(piece.numel())
    return tensors


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _size(spec: Spec) -> int:
    return prod(spec.shape) * spec.dtype.itemsize


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
