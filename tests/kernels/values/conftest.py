"""Kernel values: on a GPU where there is one, else in Triton's interpreter on the CPU, in a process of its own.

    TRITON_INTERPRET=1 pytest tests/kernels/values

Triton decides at the first import whether it interprets, so a run of all tests leaves this folder to
`test_in_the_interpreter.py`. The interpreter gets bfloat16 products and roundings wrong: float32 only there.
"""

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # for compare

GPU = torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ
if not GPU and "TRITON_INTERPRET" not in os.environ:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(params=["float32", "bfloat16"] if GPU else ["float32"])
def dtype(request):
    return getattr(torch, request.param)
