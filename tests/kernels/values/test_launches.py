"""Every launch that `recycle_kernels.compile` lists can run."""

import torch
from compare import DEVICE
from recycle_kernels.launches import StageShape, launches

TINY = StageShape(1, 2, 16, heads=2, kv_heads=1, ffn=16, vocabulary=20, parameters=100, dtype=torch.float32)


def test_every_launch_of_a_stage_runs():
    calls = launches(TINY, torch.device(DEVICE))
    assert list(calls) == [
        "norm",
        "norm_residual",
        "positions",
        "activation",
        "products",
        "fixed_point",
        "optimizer",
        "head",
    ]
    for call in calls.values():
        call()
