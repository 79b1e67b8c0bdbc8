"""A worker recognises the cause of its own failure."""

import os
import threading
from types import SimpleNamespace

import pytest
import torch

from recycle_pp.execution import worker


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (torch.OutOfMemoryError("CUDA"), "out_of_memory"),
        (MemoryError(), "out_of_memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "out_of_memory"),
        (RuntimeError("Triton Error [CUDA]: out of memory"), "out_of_memory"),
        (torch.distributed.DistBackendError("NCCL error: Cuda failure 2 'out of memory'"), "out_of_memory"),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), "gpu"),
        (torch.AcceleratorError("CUDA error: out of memory"), "out_of_memory"),
        (RuntimeError("CUDA error: device-side assert triggered"), "gpu"),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), "gpu"),
        (torch.distributed.DistBackendError("NCCL error: unhandled cuda error, ncclUnhandledCudaError"), "gpu"),
        (torch.distributed.DistBackendError("NCCL error: remote process exited"), "exception"),
        (RuntimeError("out of resource: shared memory, Required: 300000"), "exception"),
        (ValueError("no"), "exception"),
    ],
)
def test_exhausted_memory_and_a_failed_gpu_are_recognised_in_any_thread(error, cause, monkeypatch):
    words = {}
    monkeypatch.setattr(worker, "last_words", lambda spec, **said: words.update(said))
    monkeypatch.setattr(os, "_exit", lambda code: None)
    monkeypatch.setattr(threading, "excepthook", lambda failed: worker._die(SimpleNamespace(), failed))

    def fail():
        raise error

    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    assert words["cause"] == cause
