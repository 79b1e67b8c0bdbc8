"""The memory of a tensor as bytes, without a copy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor of any dtype, writable. Keeps it alive.

    RuntimeError if the tensor is not contiguous: a copy would be written to in its place.
    """
    array: Any = tensor.detach().view(-1).view(torch.uint8).numpy()  # memoryview knows NumPy, its type does not say so
    return memoryview(array)
