"""Exposes a tensor's memory as bytes without a copy, and allocates aligned memory for reproducible results."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 256  # bytes; the result of a matrix product may depend on the alignment of its operands


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The writable memory of a contiguous CPU tensor of any dtype. Keeps the tensor alive.

    Raises RuntimeError if the tensor is not contiguous, because writes would then go to a copy.
    """
    # memoryview accepts NumPy arrays, but its type annotation does not
    array: Any = tensor.detach().view(-1).view(torch.uint8).numpy()
    return memoryview(array)


def aligned_bytes(size: int, device: torch.device) -> Tensor:
    """Uninitialised memory, uint8 (size,), at a multiple of `ALIGNMENT` bytes. torch aligns to 64 bytes on a CPU."""
    if device.type != "cpu":
        return torch.empty(size, dtype=torch.uint8, device=device)  # torch aligns to 512 bytes on a GPU
    memory = torch.empty(size + ALIGNMENT, dtype=torch.uint8)
    start = -memory.data_ptr() % ALIGNMENT
    return memory[start : start + size]


def aligned(tensor: Tensor) -> Tensor:
    """The tensor or, if necessary, a copy. The result is contiguous and at a multiple of `ALIGNMENT` bytes."""
    if tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0:
        return tensor
    memory = aligned_bytes(tensor.nbytes, tensor.device).view(tensor.dtype).view(tensor.shape)
    return memory.copy_(tensor)
