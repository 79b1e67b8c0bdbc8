"""Tests of kernel values. They run on a GPU, or without one in Triton's interpreter, in a separate process.

    TRITON_INTERPRET=1 pytest tests/kernels/values

Triton enables its interpreter when it is first imported. So without a GPU, a run of all tests skips this folder, and
`test_in_the_interpreter.py` runs it. The interpreter computes wrong bfloat16 products and roundings, so there the tests
use float32 only.
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
