"""Reads the keys of `model` for this project's Transformer from a config.json of the Llama family.

    llama_sizes(Path("SmolLM2-135M"), sequence=2048)       # {"layers": 30, "width": 576, "tied": True, ...}

Supports Llama, Mistral, Qwen2, Qwen3, and models with one of their model_types (SmolLM, TinyLlama, Yi, ...). Any other
model raises ValueError, with one sentence that states the missing feature; `model=hf` trains such models.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# model_type -> defaults of transformers for missing keys, if they differ from the defaults in this module
FAMILY: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {"num_key_value_heads": 32, "sliding_window": 4096, "head_dim": 128},
}


def llama_sizes(folder: Path, sequence: int) -> dict[str, Any]:
    """The keys of `model` and their values.

    folder    folder with the config.json
    sequence  tokens per sample; a sliding window of at least that many tokens has no effect and is allowed

    Raises ValueError if this project's Transformer lacks a feature of the model.
    """
    try:
        c = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"model.path must name a folder with a config.json, not {folder}") from error
    kind = c.get("model_type")
    c = FAMILY.get(kind, {}) | c
    theta = c.get("rope_theta") or 10000.0
    rope = {"rope_theta": theta, **(c.get("rope_scaling") or c.get("rope_parameters") or {})}
    scaling = rope.get("rope_type") or rope.get("type") or "default"
    lacks = {
        f"model_type {kind}": kind not in FAMILY,
        f"hidden_act {c.get('hidden_act')}": c.get("hidden_act", "silu") != "silu",
        "attention_bias": bool(c.get("attention_bias")),
        "mlp_bias": bool(c.get("mlp_bias")),
        "attention_dropout": bool(c.get("attention_dropout")),
        f"rope_type {scaling}": scaling not in ("default", "linear", "llama3"),
        "sliding_window": 0 < _window(c) < sequence,
    }
    for what in (name for name, there in lacks.items() if there):
        raise ValueError(f"model=llama does not support {what}, which {folder / 'config.json'} requires; use model=hf")
    try:
        return _sizes(c, rope, scaling)
    except KeyError as error:
        raise ValueError(f"{folder / 'config.json'} has no {error.args[0]}, which model=llama needs") from error


def _sizes(c: dict[str, Any], rope: dict[str, Any], scaling: str) -> dict[str, Any]:
    heads, width, kind = c["num_attention_heads"], c["hidden_size"], c["model_type"]
    return {
        "layers": c["num_hidden_layers"],
        "width": width,
        "heads": heads,
        "kv_heads": c.get("num_key_value_heads") or heads,
        "head_dim": c.get("head_dim") or width // heads,
        "ffn": c["intermediate_size"],
        "vocabulary": c["vocab_size"],
        "rope_theta": float(rope["rope_theta"]),
        "rope_scaling": _scaling(scaling, rope),
        "norm_eps": float(c.get("rms_norm_eps", 1e-6)),
        "tied": bool(c.get("tie_word_embeddings", False)),
        "qkv_bias": kind == "qwen2",
        "qk_norm": kind == "qwen3",
    }


def _window(c: dict[str, Any]) -> int:
    """Size of the sliding attention window in tokens; 0 if there is no window."""
    if c["model_type"] != "mistral" and not c.get("use_sliding_window", False):
        return 0
    return c.get("sliding_window") or 0


def _scaling(kind: str, rope: dict[str, Any]) -> list[float] | None:
    """The value of model.rope_scaling; None for unscaled positions.

    It is [factor], or for Llama 3.1 [factor, low_freq_factor, high_freq_factor, original_max_position_embeddings].
    """
    if kind == "default":
        return None
    keys = ["factor"]
    if kind == "llama3":
        keys += ["low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
    return [float(rope[key]) for key in keys]
