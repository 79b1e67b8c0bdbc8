"""The parameters of the project's Transformer under the names of Hugging Face's Llama.

    for own, parts in to_llama(settings.model).items():      # "layers.0.attention.wqkv.weight"
        for name, rows in parts:                             # "model.layers.0.self_attn.q_proj.weight", slice(0, 64)
            ...
    config = llama_config(settings.model)                    # the content of config.json

Both models rotate half vectors (rotate-half RoPE) and order rows as q | k | v and gate | up. A tensor of this project
therefore consists of Hugging Face's tensors, concatenated along the rows without a permutation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from recycle_pp.config.settings import Model


def to_llama(model: Model) -> dict[str, list[tuple[str, slice]]]:
    """This project's name -> [(Hugging Face's name, rows of this project's tensor)] for every parameter, in canonical
    order."""
    assert isinstance(model.layers, int)  # true for the project's Transformer
    head = model.head_size
    everything, q, k = slice(None), model.heads * head, model.kv_heads * head
    names = {"embedding.weight": [("model.embed_tokens.weight", everything)]}
    for layer in range(model.layers):
        own, hf = f"layers.{layer}.", f"model.layers.{layer}."
        attention, mlp = f"{hf}self_attn.", f"{hf}mlp."
        names |= {
            f"{own}attention_norm.weight": [(f"{hf}input_layernorm.weight", everything)],
            f"{own}attention.wqkv.weight": [
                (f"{attention}q_proj.weight", slice(0, q)),
                (f"{attention}k_proj.weight", slice(q, q + k)),
                (f"{attention}v_proj.weight", slice(q + k, q + 2 * k)),
            ],
            **_more(model, own, attention, {"q": slice(0, q), "k": slice(q, q + k), "v": slice(q + k, q + 2 * k)}),
            f"{own}attention.wo.weight": [(f"{attention}o_proj.weight", everything)],
            f"{own}ffn_norm.weight": [(f"{hf}post_attention_layernorm.weight", everything)],
            f"{own}ffn.w_gate_up.weight": [
                (f"{mlp}gate_proj.weight", slice(0, model.ffn)),
                (f"{mlp}up_proj.weight", slice(model.ffn, 2 * model.ffn)),
            ],
            f"{own}ffn.w_down.weight": [(f"{mlp}down_proj.weight", everything)],
        }
    names["norm.weight"] = [("model.norm.weight", everything)]
    return names if model.tied else names | {"head.weight": [("lm_head.weight", everything)]}


def _more(model: Model, own: str, attention: str, rows: dict[str, slice]) -> dict[str, list[tuple[str, slice]]]:
    """The additional parameters of Qwen's attention."""
    names: dict[str, list[tuple[str, slice]]] = {}
    if model.qkv_bias:
        names[f"{own}attention.qkv_bias.weight"] = [(f"{attention}{x}_proj.bias", rows[x]) for x in "qkv"]
    if model.qk_norm:
        names |= {f"{own}attention.{x}_norm.weight": [(f"{attention}{x}_norm.weight", slice(None))] for x in "qk"}
    return names


def from_llama(model: Model, name: str, read: Callable[[str], Tensor]) -> Tensor:
    """This project's tensor `name`, concatenated from Hugging Face's tensors.

    read(name): returns Hugging Face's tensor of this name
    """
    return torch.cat([read(part) for part, _ in to_llama(model)[name]])


def llama_config(model: Model) -> dict[str, Any]:
    """The content of a config.json from which transformers builds this model."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": model.vocabulary,
        "hidden_size": model.width,
        "intermediate_size": model.ffn,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_size,
        "max_position_embeddings": model.sequence,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
    }
