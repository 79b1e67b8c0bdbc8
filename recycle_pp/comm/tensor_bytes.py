"""The memory of a tensor as bytes, without a copy; and memory at addresses that change no bit of a result."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 256  # bytes: the bits of a matrix product may depend on where its operands lie


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor of any dtype, writable. Keeps it alive.

    RuntimeError if the tensor is not contiguous: a copy would be written to in its place.
    """
    array: Any = tensor.detach().view(-1).view(torch.uint8).numpy()  # memoryview knows NumPy, its type does not say so
    return memoryview(array)


def aligned_bytes(size: int, device: torch.device) -> Tensor:
    """Uninitialised memory, uint8 (size,), at a multiple of `ALIGNMENT` bytes. torch's own is at 64 on a CPU."""
    if device.type != "cpu":
        return torch.empty(size, dtype=torch.uint8, device=device)  # at 512 on a GPU
    memory = torch.empty(size + ALIGNMENT, dtype=torch.uint8)
    start = -memory.data_ptr() % ALIGNMENT
    return memory[start : start + size]


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, contiguous, at a multiple of `ALIGNMENT` bytes; a copy only if it is not."""
    if tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0:
        return tensor
    memory = aligned_bytes(tensor.nbytes, tensor.device).view(tensor.dtype).view(tensor.shape)
    return memory.copy_(tensor)
