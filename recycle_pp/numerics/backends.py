"""The back end of `numerics.operations` that `model.kernels` selects.

ops = operations(settings.model.kernels, device)    # auto (triton on GPUs) | triton | reference
"""

from __future__ import annotations

import torch

from .operations import Operations


def operations(kernels: str, device: torch.device) -> Operations:
    """The backend for `settings.model.kernels`."""
    if kernels not in ("auto", "triton", "reference"):
        raise ValueError(f"model.kernels must be auto, triton or reference, not {kernels!r}")
    if kernels == "triton" or (kernels == "auto" and device.type == "cuda"):
        from . import triton_operations as fused  # not imported on a CPU, because that takes a second

        return fused
    from . import torch_operations as reference

    return reference
