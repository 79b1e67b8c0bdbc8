"""Every kernel of a stage compiles without spills for GPUs that are not present. Matrix products use tensor cores."""

import os
import re
from dataclasses import replace

import pytest
import torch
from recycle_kernels.compile import SHAPE, compile_stage

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the value tests run the compiled kernels"),
    pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="Triton interprets in this process"),
]

KERNELS = {
    "adamw._adamw_kernel",
    "adamw._norm_kernel",
    "fixed_point._dequantise_kernel",
    "fixed_point._quantise_kernel",
    "head_loss._grad_kernel",
    "head_loss._loss_kernel",
    "rms_norm._backward_kernel",
    "rms_norm._forward_kernel",
    "rope._rope_kernel",
    "swiglu._backward_kernel",
    "swiglu._forward_kernel",
    "weight_grad._kernel",
}
# widths that are not powers of two, partial tiles, one head, float32
ODD = replace(SHAPE, batch=1, sequence=100, width=1000, heads=5, kv_heads=1, ffn=1111, vocabulary=50257)
ODD = replace(ODD, parameters=12345, dtype=torch.float32)
# the largest products in which the rows of either operand are not multiples of 16 bytes
ODD_HALF = replace(ODD, width=1040, ffn=4111, dtype=torch.bfloat16)
WIDE = replace(SHAPE, width=16384, heads=128, ffn=512, vocabulary=0)  # the widest supported rows
MATRIX = {80: "mma.sync.aligned.m16n8k16", 90: "wgmma.mma_async", 100: "tcgen05.mma"}  # tensor-core instructions


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """A compile cache for this test run only."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "triton"))


def misfits(binaries):
    """The kernels that do not fit, as text for the assertion message."""
    return [(b.kernel, b.spills, b.shared, b.signature) for b in binaries if not b.fits]


LOSS = {"head_loss._grad_kernel", "head_loss._loss_kernel"}  # compiling these two takes at least half of the time


@pytest.mark.parametrize(
    ("arch", "shape", "kernels"),
    [
        pytest.param(
            90, replace(SHAPE, vocabulary=0), KERNELS - LOSS, id="90-all-but-the-loss", marks=pytest.mark.slow
        ),
        pytest.param(90, SHAPE, KERNELS, id="90", marks=pytest.mark.slow),
        pytest.param(80, SHAPE, KERNELS, id="80", marks=pytest.mark.slow),
        pytest.param(100, SHAPE, KERNELS, id="100", marks=pytest.mark.slow),
    ],
)
def test_every_kernel_of_a_large_stage_fits_the_registers(arch, shape, kernels):
    binaries = compile_stage(arch, shape)
    assert {b.kernel for b in binaries} == kernels
    assert misfits(binaries) == []
    # every kernel must load or store vectors of at least 8 bytes
    assert [b.kernel for b in binaries if not re.search(r"(ld|st)\.global\S*\.v[24]\.b(32|64)", b.ptx)] == []
    products = [b for b in binaries if b.kernel == "weight_grad._kernel"]
    assert len(products) == 4  # in float32 or fixed point, each overwriting or adding
    assert all(MATRIX[arch] in b.ptx for b in products)


@pytest.mark.parametrize(
    "shape",
    [ODD, *(pytest.param(shape, marks=pytest.mark.slow) for shape in (ODD_HALF, WIDE))],
    ids=["odd", "odd-half", "wide"],
)
def test_odd_and_wide_stages_fit(shape):
    assert misfits(compile_stage(90, shape)) == []


def test_a_spill_is_detected(monkeypatch):
    from importlib import import_module

    module = import_module("recycle_kernels.weight_grad")
    monkeypatch.setattr(module, "ROUNDS", 1)  # adds the whole tile in one round, which spills
    assert "weight_grad._kernel" in [name for name, *_ in misfits(compile_stage(90, replace(SHAPE, vocabulary=0)))]
