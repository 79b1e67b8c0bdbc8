"""Distinguishes GPU failures, out-of-memory errors and failed connections. torch raises RuntimeError for all of them.

is_gpu_failure(error)       # True: this process can no longer use its GPU and must end; its peers are healthy
is_out_of_memory(error)     # True: the memory of the device or of the host is full
"""

from __future__ import annotations

import torch

# CUDA errors other than "out of memory" are sticky. Every later CUDA call of the process returns the same error. The
# texts are from torch (c10/cuda/CUDAException.cpp), from NCCL (ncclGetErrorString, NCCLUtils.cpp) and from Triton
# (backends/nvidia/driver.c), whose launches report the failure of an earlier kernel.
GPU_FAILURES = (
    "CUDA error", "CUDA driver error", "unhandled cuda error", "ncclUnhandledCudaError", "Triton Error [CUDA]"
)  # fmt: skip
FULL_MEMORY = ("out of memory", "can't allocate memory")


def is_gpu_failure(error: BaseException | None) -> bool:
    return (
        isinstance(error, RuntimeError)
        and not is_out_of_memory(error)
        and (isinstance(error, torch.AcceleratorError) or any(text in str(error) for text in GPU_FAILURES))
    )


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether the error reports that the memory of the device or of the host is full.

    Detects torch.OutOfMemoryError, MemoryError, and the plain RuntimeErrors of Triton, NCCL and torch on a CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return error is not None and any(text in str(error) for text in FULL_MEMORY)
