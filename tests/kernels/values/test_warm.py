"""Warming up: every kernel is called once, on tensors that are really there."""

import torch
from compare import DEVICE
from recycle_kernels.warm import StageShape, warm

TINY = StageShape(1, 2, 16, heads=2, kv_heads=1, ffn=16, vocabulary=20, parameters=100, dtype=torch.float32)


def test_a_stage_is_warmed_kernel_by_kernel():
    names = [name for name, seconds in warm(TINY, DEVICE) if seconds > 0]
    assert names == ["norm", "norm_residual", "positions", "activation", "products", "fixed_point", "optimizer", "head"]
