"""On machines without a GPU, runs the value tests in Triton's interpreter, which needs a separate process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

STAGE = Path(__file__).parent / "values" / "test_in_the_model.py"
PARTS = {"kernels": [STAGE.parent, f"--ignore={STAGE}"], "stage": [STAGE]}


@pytest.mark.parametrize("part", ["kernels", pytest.param("stage", marks=pytest.mark.slow)])
@pytest.mark.skipif(torch.cuda.is_available(), reason="the value tests run on the GPU")
@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="the value tests run in this process")
def test_the_value_tests_pass_in_the_interpreter(part, request):
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning"]
    options += ["--full"] * request.config.getoption("--full")
    command = [sys.executable, "-m", "pytest", *PARTS[part], *options]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stdout + result.stderr
