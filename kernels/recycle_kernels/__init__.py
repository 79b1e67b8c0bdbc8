"""Triton kernels of a pipeline stage: forward, backward for the input, backward for the weights, optimizer step.

    from recycle_kernels import rms_norm, rope_qkv, swiglu, head_loss, weight_grad, adamw

One file per kernel: formula, public function, reference in plain torch, autograd Function, Triton kernels. The package
imports torch and Triton only. `launches` launches every kernel of a stage once. `compile` compiles these launches for
GPUs that are not present.
"""

from .adamw import (
    AdamW,
    Chunks,
    adamw,
    adamw_reference,
    make_chunks,
    roll_back,
    squared_norms,
    squared_norms_reference,
)
from .fixed_point import dequantise, dequantise_reference, quantise_add, quantise_add_reference
from .head_loss import cross_entropy, cross_entropy_reference, head_loss, head_loss_reference
from .rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_keeping, rms_norm_reference
from .rope import rope, rope_qkv, rope_qkv_reference, rope_reference, rope_table
from .swiglu import swiglu, swiglu_reference
from .weight_grad import Tile, weight_grad, weight_grad_fixed, weight_grad_reference

__all__ = [
    "AdamW",
    "Chunks",
    "Tile",
    "adamw",
    "adamw_reference",
    "add_rms_norm",
    "add_rms_norm_reference",
    "cross_entropy",
    "cross_entropy_reference",
    "dequantise",
    "dequantise_reference",
    "head_loss",
    "head_loss_reference",
    "make_chunks",
    "quantise_add",
    "quantise_add_reference",
    "rms_norm",
    "rms_norm_keeping",
    "rms_norm_reference",
    "roll_back",
    "rope",
    "rope_qkv",
    "rope_qkv_reference",
    "rope_reference",
    "rope_table",
    "squared_norms",
    "squared_norms_reference",
    "swiglu",
    "swiglu_reference",
    "weight_grad",
    "weight_grad_fixed",
    "weight_grad_reference",
]
