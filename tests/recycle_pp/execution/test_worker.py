"""How a worker ends."""

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
        (RuntimeError("out of resource: shared memory, Required: 300000"), "exception"),
        (ValueError("no"), "exception"),
    ],
)
def test_want_of_memory_is_recognised_whoever_says_it_and_in_whatever_thread(error, cause, monkeypatch):
    words = {}
    monkeypatch.setattr(worker, "last_words", lambda spec, **said: words.update(said))
    monkeypatch.setattr(os, "_exit", lambda code: None)
    monkeypatch.setattr(threading, "excepthook", lambda failed: worker._die(SimpleNamespace(), failed))

    def fail():
        raise error

    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    assert words["cause"] == worker._cause(error) == cause
