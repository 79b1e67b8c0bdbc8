"""Triton kernels of a pipeline stage: forward, backward for the input, backward for the weights, optimizer step.

    from recycle_kernels import rms_norm, rope_qkv, swiglu, head_loss, weight_grad, adamw

One file a kernel: the formula, the public function, its reference in plain torch, the autograd Function, the kernels.
The package knows torch and Triton only. `deferral` says how a backward splits into I and W; `warm` compiles everything
a stage needs; `compile` does so for GPUs that are not here; `tuning` finds and keeps the tiles of the matrix kernel.
"""

from .adamw import (
    Chunks,
    adamw,
    adamw_reference,
    clip_factor,
    make_chunks,
    roll_back,
    squared_norm,
    squared_norm_reference,
)
from .fixed_point import dequantise, dequantise_reference, quantise_add, quantise_add_reference
from .head_loss import (
    add_head_weight_grad,
    cross_entropy,
    cross_entropy_reference,
    head_loss,
    head_loss_reference,
)
from .rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from .rope import rope, rope_qkv, rope_qkv_reference, rope_reference, rope_table
from .swiglu import swiglu, swiglu_reference
from .tuning import from_json, to_json, tune
from .weight_grad import Tile, Tiles, weight_grad, weight_grad_fixed, weight_grad_reference

__all__ = [
    "Chunks",
    "Tile",
    "Tiles",
    "adamw",
    "adamw_reference",
    "add_head_weight_grad",
    "add_rms_norm",
    "add_rms_norm_reference",
    "clip_factor",
    "cross_entropy",
    "cross_entropy_reference",
    "dequantise",
    "dequantise_reference",
    "from_json",
    "head_loss",
    "head_loss_reference",
    "make_chunks",
    "quantise_add",
    "quantise_add_reference",
    "rms_norm",
    "rms_norm_reference",
    "roll_back",
    "rope",
    "rope_qkv",
    "rope_qkv_reference",
    "rope_reference",
    "rope_table",
    "squared_norm",
    "squared_norm_reference",
    "swiglu",
    "swiglu_reference",
    "to_json",
    "tune",
    "weight_grad",
    "weight_grad_fixed",
    "weight_grad_reference",
]
