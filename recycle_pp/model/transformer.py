"""A Llama-style decoder, or any contiguous part of one.

    whole = Transformer(settings.model, range(settings.model.layers), seed=0)            # plain PyTorch
    loss = whole(tokens, targets, key=(seed, step, g))
    part = Transformer(settings.model, range(2, 4), seed=0, sink=Sink(gradients))        # a pipeline stage

RMSNorm, RoPE, grouped-query attention, SwiGLU, untied embedding and head. Activations travel as (b T, H) matrices; the
residual stream is float32, under bf16 autocast only the matrices are multiplied in bf16. Everything random is keyed:
initial weights by (seed, name of the module), dropout by (seed, step, g, layer), so neither depends on the split,
on the worker, or on whether a layer is recomputed.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from recycle_pp.model import deferred
from recycle_pp.model.deferred import Sink
from recycle_pp.model.ops import operations, rope_tables
from recycle_pp.settings import Model

Key = tuple[int, int, int]  # seed, step, g: what dropout is drawn from


def generator(device: torch.device, *key: object) -> torch.Generator:
    """A random generator that depends on nothing but `key`."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)


class Linear(nn.Module):
    """A bias-free linear layer; under autocast it multiplies in the autocast dtype and keeps that copy of its weight
    until the weight changes."""

    def __init__(self, inputs: int, outputs: int, std: float, key: tuple[object, ...], sink: Sink | None):
        super().__init__()
        weight = torch.empty(outputs, inputs).normal_(0, std, generator=generator(torch.device("cpu"), *key))
        self.weight = nn.Parameter(weight)
        self.sink, self.index = sink, 0

    def forward(self, x: Tensor) -> Tensor:
        if self.sink is None or not torch.is_autocast_enabled(x.device.type):
            return deferred.linear(x, self.weight, self.sink, self.index)
        dtype = torch.get_autocast_dtype(x.device.type)
        return deferred.linear(x.to(dtype), self._lowered(dtype), self.sink, self.index)

    def _lowered(self, dtype: torch.dtype) -> Tensor:
        version = self.weight._version
        if getattr(self, "_version", None) != version:
            self._version, self._copy = version, self.weight.detach().to(dtype)
        return self._copy


class Norm(nn.Module):
    """RMSNorm in float32."""

    def __init__(self, model: Model, sink: Sink | None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(model.width))
        self.eps, self.kernels = model.norm_eps, model.kernels
        self.sink, self.index = sink, 0

    def forward(self, x: Tensor) -> Tensor:
        weight = deferred.norm_weight(self.weight, self.sink, self.index)
        return operations(self.kernels, x.device).rms_norm(x, weight, self.eps)


class Embedding(nn.Module):
    def __init__(self, model: Model, seed: int, sink: Sink | None):
        super().__init__()
        random = generator(torch.device("cpu"), seed, "embedding")
        self.weight = nn.Parameter(torch.empty(model.vocabulary, model.width).normal_(0, 0.02, generator=random))
        self.sink, self.index = sink, 0

    def forward(self, tokens: Tensor) -> Tensor:
        return deferred.embedding(tokens, self.weight, self.sink, self.index)


class Attention(nn.Module):
    def __init__(self, model: Model, std: float, key: tuple[object, ...], sink: Sink | None):
        super().__init__()
        self.model, self.dim = model, model.width // model.heads
        rows = (model.heads + 2 * model.kv_heads) * self.dim
        self.wqkv = Linear(model.width, rows, 0.02, (*key, "wqkv"), sink)
        self.wo = Linear(model.width, model.width, std, (*key, "wo"), sink)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads, kv_heads = self.model.heads, self.model.kv_heads
        qkv = self.wqkv(x).view(-1, self.model.sequence, heads + 2 * kv_heads, self.dim)
        q, k, v = operations(self.model.kernels, x.device).rope_qkv(qkv, heads, kv_heads, cos, sin)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)
        return self.wo(y.transpose(1, 2).reshape(x.shape[0], -1))


class FeedForward(nn.Module):
    def __init__(self, model: Model, std: float, key: tuple[object, ...], sink: Sink | None):
        super().__init__()
        self.kernels = model.kernels
        self.w_gate_up = Linear(model.width, 2 * model.ffn, 0.02, (*key, "w_gate_up"), sink)
        self.w_down = Linear(model.ffn, model.width, std, (*key, "w_down"), sink)

    def forward(self, x: Tensor) -> Tensor:
        return self.w_down(operations(self.kernels, x.device).swiglu(self.w_gate_up(x)))


class Layer(nn.Module):
    def __init__(self, model: Model, layer: int, seed: int, sink: Sink | None):
        super().__init__()
        self.layer, self.dropout = layer, model.dropout
        std = 0.02 / (2 * model.layers) ** 0.5  # GPT-2: the residual branches start smaller, the deeper the model
        key = (seed, "layer", layer)
        self.attention_norm = Norm(model, sink)
        self.attention = Attention(model, std, key, sink)
        self.ffn_norm = Norm(model, sink)
        self.ffn = FeedForward(model, std, key, sink)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, key: Key | None) -> Tensor:
        random = generator(x.device, *key, self.layer) if key and self.dropout else None
        x = x + self._drop(self.attention(self.attention_norm(x), cos, sin), random)
        return x + self._drop(self.ffn(self.ffn_norm(x)), random)

    def _drop(self, x: Tensor, random: torch.Generator | None) -> Tensor:
        if random is None:
            return x
        keep = torch.empty_like(x).bernoulli_(1 - self.dropout, generator=random)
        return x * keep.div_(1 - self.dropout)


class Transformer(nn.Module):
    """The layers `layers` of the model, with the embedding if they begin it and the head if they end it.

    Parameter names are those of the full model (`layers.3.attention.wqkv.weight`), whatever the part.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, model: Model, layers: range, seed: int, sink: Sink | None = None):
        super().__init__()
        self.model = model
        self.embedding = Embedding(model, seed, sink) if layers.start == 0 else None
        self.layers = nn.ModuleDict({str(layer): Layer(model, layer, seed, sink) for layer in layers})
        last = layers.stop == model.layers
        self.norm = Norm(model, sink) if last else None
        self.head = Linear(model.width, model.vocabulary, 0.02, (seed, "head"), sink) if last else None
        for index, (name, _) in enumerate(self.named_parameters()):
            self.get_submodule(name.rpartition(".")[0]).index = index  # type: ignore[assignment]
        cos, sin = rope_tables(model.sequence, model.width // model.heads, model.rope_theta, torch.device("cpu"))
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, source: Tensor, targets: Tensor | None = None, *, key: Key | None = None) -> Tensor:
        """source (b, T): int64 tokens for the first part, else float32 (b, T, H); targets (b, T) int64 for the last.

        Returns (b, T, H) float32, or the last part's mean loss over its b T tokens, a float32 scalar. `key` switches
        dropout on.
        """
        shape = source.shape[:2]
        x = source.flatten(0, 1) if self.embedding is None else self.embedding(source.flatten())
        for layer in self.layers.values():
            if self.model.recompute and torch.is_grad_enabled():
                x = checkpoint(layer, x, self.cos, self.sin, key, use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(x, self.cos, self.sin, key)
        if self.norm is None or self.head is None:
            return x.view(*shape, -1)
        assert targets is not None
        return operations(self.model.kernels, x.device).cross_entropy(self.head(self.norm(x)), targets.flatten())
