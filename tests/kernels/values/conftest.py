"""Tests of kernel values: on a GPU if there is one, else in Triton's interpreter on the CPU, in a separate process.

    TRITON_INTERPRET=1 pytest tests/kernels/values

Triton enables its interpreter at the first import. So without a GPU, a run of all tests skips this folder, and
`test_in_the_interpreter.py` runs it. The interpreter's bfloat16 products and roundings are wrong, so it tests float32
only.
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
