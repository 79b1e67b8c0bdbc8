"""A Llama-style decoder, or any contiguous part of one.

    whole = Transformer(Build(settings.model, seed=0, device=device), range(8))   # plain PyTorch
    loss = whole(tokens, targets, key=(seed, step, g))
    module = part(settings, 1, device)                                            # a pipeline stage, see `stage_module`

RMSNorm, RoPE, grouped-query attention, SwiGLU, untied embedding and head. Activations travel as (b T, H) matrices. The
residual stream is float32, under bf16 autocast too (only the matrices are multiplied in bf16); in bf16 it is bfloat16,
as all else but the insides of norms, attention and loss. Everything random is keyed: initial weights by (seed, module),
dropout by (seed, step, g, layer), so neither depends on the split, on the worker, or on whether a layer is recomputed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recycle_pp.config.settings import Model, Settings
from recycle_pp.numerics import weight_grad_store as deferred
from recycle_pp.numerics.backends import operations
from recycle_pp.numerics.operations import Operations
from recycle_pp.numerics.weight_grad_store import WeightGradStore

from .recompute import recomputed
from .split import layers_of
from .stage_module import Batch, Boundary, Key

STD = 0.02  # of initial weights


def part(settings: Settings, stage: int, device: torch.device) -> TransformerStage:
    """Stage `stage` of the model that `settings` describe."""
    return TransformerStage(settings, stage, device)


@dataclass
class Build:
    """What every module of a model is built from. Its layers are ordinary autograd layers until they get a sink."""

    model: Model
    seed: int
    device: torch.device
    stream: torch.dtype = torch.float32  # of the activations between layers

    def __post_init__(self) -> None:
        self.ops: Operations = operations(self.model.kernels, self.device)

    def normal(self, rows: int, columns: int, std: float, *name: object) -> nn.Parameter:
        """Drawn on the CPU whatever the device, from (seed, name) alone."""
        random = generator(torch.device("cpu"), self.seed, *name)
        return nn.Parameter(torch.empty(rows, columns).normal_(0, std, generator=random).to(self.device))


def generator(device: torch.device, *key: object) -> torch.Generator:
    """A random generator that depends on nothing but `key`."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)


class Linear(nn.Module):
    """A bias-free linear layer; under autocast it keeps the bf16 copy of its weight until the weight changes."""

    def __init__(self, build: Build, inputs: int, outputs: int, std: float, *name: object):
        super().__init__()
        self.weight = build.normal(outputs, inputs, std, *name)
        self.sink: WeightGradStore | None = None
        self.index = -1
        self._copy, self._copied = torch.empty(0), -1

    def forward(self, x: Tensor) -> Tensor:
        return deferred.linear(*self.operands(x), self.sink, self.index)

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x and the weight, in the dtype to multiply in."""
        if self.sink is None or not torch.is_autocast_enabled(x.device.type):
            return x, self.weight.to(x.dtype)
        dtype = torch.get_autocast_dtype(x.device.type)
        if self._copied != self.weight._version:
            self._copy, self._copied = self.weight.detach().to(dtype), self.weight._version
        return x.to(dtype), self._copy


class Head(Linear):
    """The projection to the vocabulary, and the mean loss of what it says: a float32 scalar."""

    def __init__(self, build: Build):
        super().__init__(build, build.model.width, build.model.vocabulary, STD, "head")
        self.loss = build.ops.head_loss

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        return self.loss(*self.operands(x), targets, self.sink, self.index)


class Norm(nn.Module):
    """RMSNorm, with the addition that ends the branch before it: (normalised, residual stream)."""

    def __init__(self, build: Build):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(build.model.width, device=build.device))
        self.add_rms_norm, self.eps = build.ops.add_rms_norm, build.model.norm_eps
        self.sink: WeightGradStore | None = None
        self.index = -1

    def forward(self, x: Tensor, branch: Tensor | None) -> tuple[Tensor, Tensor]:
        return self.add_rms_norm(x, branch, deferred.norm_weight(self.weight, self.sink, self.index), self.eps)


class Embedding(nn.Module):
    def __init__(self, build: Build):
        super().__init__()
        self.weight = build.normal(build.model.vocabulary, build.model.width, STD, "embedding")
        self.sink: WeightGradStore | None = None
        self.index, self.stream = -1, build.stream

    def forward(self, tokens: Tensor) -> Tensor:
        return deferred.embedding(tokens, self.weight, self.sink, self.index).to(self.stream)


class Attention(nn.Module):
    """Causal attention of `heads` query heads, each `heads / kv_heads` of which share keys and values."""

    def __init__(self, build: Build, std: float, layer: int):
        super().__init__()
        model = build.model
        self.shape = (model.sequence, model.heads + 2 * model.kv_heads, model.width // model.heads)
        self.heads, self.kv_heads, self.rope_qkv = model.heads, model.kv_heads, build.ops.rope_qkv
        self.wqkv = Linear(build, model.width, self.shape[1] * self.shape[2], STD, "layer", layer, "wqkv")
        self.wo = Linear(build, model.width, model.width, std, "layer", layer, "wo")

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        qkv = self.wqkv(x).view(-1, *self.shape)
        q, k, v = (part.transpose(1, 2) for part in self.rope_qkv(qkv, self.heads, self.kv_heads, cos, sin))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        return self.wo(y.transpose(1, 2).reshape(x.shape))


class FeedForward(nn.Module):
    def __init__(self, build: Build, std: float, layer: int):
        super().__init__()
        model, self.swiglu = build.model, build.ops.swiglu
        self.w_gate_up = Linear(build, model.width, 2 * model.ffn, STD, "layer", layer, "w_gate_up")
        self.w_down = Linear(build, model.ffn, model.width, std, "layer", layer, "w_down")

    def forward(self, x: Tensor) -> Tensor:
        return self.w_down(self.swiglu(self.w_gate_up(x)))


class Layer(nn.Module):
    """(x, branch) -> (x, branch): each norm adds up what the branch before it left, so the last one stays open."""

    def __init__(self, build: Build, layer: int):
        super().__init__()
        self.layer, self.dropout = layer, build.model.dropout
        std = STD / (2 * depth(build.model)) ** 0.5  # GPT-2: the residual branches start smaller, the deeper the model
        self.attention_norm = Norm(build)
        self.attention = Attention(build, std, layer)
        self.ffn_norm = Norm(build)
        self.ffn = FeedForward(build, std, layer)

    def forward(
        self, x: Tensor, branch: Tensor | None, cos: Tensor, sin: Tensor, key: Key | None
    ) -> tuple[Tensor, Tensor]:
        random = generator(x.device, *key, self.layer) if key and self.dropout else None
        y, x = self.attention_norm(x, branch)
        y, x = self.ffn_norm(x, self._drop(self.attention(y, cos, sin), random))
        return x, self._drop(self.ffn(y), random)

    def closed(self, x: Tensor, cos: Tensor, sin: Tensor, key: Key | None) -> Tensor:
        """A function of one tensor, to be recomputed: the branch is added."""
        return torch.add(*self(x, None, cos, sin, key))

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

    def __init__(self, build: Build, layers: range):
        super().__init__()
        model = build.model
        self.recompute = model.recompute
        self.embedding = Embedding(build) if layers.start == 0 else None
        self.layers = nn.ModuleDict({str(layer): Layer(build, layer) for layer in layers})
        last = layers.stop == depth(model)
        self.norm = Norm(build) if last else None
        self.head = Head(build) if last else None
        for index, (name, _) in enumerate(self.named_parameters()):
            self.get_submodule(name.rpartition(".")[0]).index = index  # type: ignore[assignment]
        cos, sin = rope_tables(model.sequence, model.width // model.heads, model.rope_theta, build.device)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, source: Tensor, targets: Tensor | None = None, *, key: Key | None = None) -> Tensor:
        """source (b, T): int64 tokens for the first part, else (b, T, H), what a part before gave; targets (b, T) int64
        for the last.

        Returns (b, T, H) of the stream's dtype, or the last part's mean loss over its b T tokens, a float32 scalar.
        `key` switches dropout on.
        """
        shape = source.shape[:2]
        x = source.flatten(0, 1) if self.embedding is None else self.embedding(source.flatten())
        branch = None
        for layer in self.layers.values():
            assert isinstance(layer, Layer)
            if self.recompute and torch.is_grad_enabled():
                x = recomputed(layer.closed, x, self.cos, self.sin, key)
            else:
                x, branch = layer(x, branch, self.cos, self.sin, key)
        if self.norm is None or self.head is None:
            return (x if branch is None else x + branch).view(*shape, -1)
        assert targets is not None
        return self.head(self.norm(x, branch)[0], targets.flatten())


class TransformerStage:
    """A `StageModule`. Every gradient waits for W, a norm's as the finished by-product of I."""

    def __init__(self, settings: Settings, stage: int, device: torch.device):
        model, parallel = settings.model, settings.parallel
        layers = layers_of(depth(model), parallel.stages, model.split)[stage]
        build = Build(model, settings.run.seed, device, stream_dtype(settings))
        self.module, self.ops = Transformer(build, layers), build.ops
        parameters = dict(self.module.named_parameters())
        self.shapes: Mapping[str, Sequence[int]] = {name: parameter.shape for name, parameter in parameters.items()}
        self.deferred = frozenset(self.shapes)
        self.parts: Mapping[str, int] = {}
        self.shared: Mapping[str, Sequence[int]] = {}
        stream = Boundary((parallel.microbatch_size, model.sequence, model.width), build.stream)
        self._first, self._last = stage == 0, stage == parallel.stages - 1
        self.takes = [] if self._first else [stream]
        self.gives = [] if self._last else [stream]
        self.reads = self._first or self._last

    def bind(
        self, masters: Mapping[str, Tensor], views: Mapping[str, Tensor], sink: WeightGradStore
    ) -> Mapping[str, nn.Parameter]:
        for module in self.module.modules():
            if isinstance(module, Linear | Norm | Embedding):
                module.sink = sink
        for name, parameter in list(self.module.named_parameters()):
            owner, _, attribute = name.rpartition(".")
            view = views[name].copy_(masters[name].copy_(parameter.detach()))
            setattr(self.module.get_submodule(owner), attribute, nn.Parameter(view))
        return dict(self.module.named_parameters())

    def __call__(self, batch: Batch | None, boundary: Sequence[Tensor], key: Key | None) -> Sequence[Tensor]:
        if batch is None:
            return [self.module(*boundary, key=key)]
        source = batch.inputs if self._first else boundary[0]
        if not self._last:
            return [self.module(source, key=key)]
        return [batch.share_of(self.module(source, batch.labels, key=key))]


def depth(model: Model) -> int:
    """How many layers the own Transformer has."""
    assert isinstance(model.layers, int)
    return model.layers


def stream_dtype(settings: Settings) -> torch.dtype:
    """Of the activations between layers, and of what stages give each other."""
    return torch.bfloat16 if settings.numerics.precision == "bf16" else torch.float32


def rope_tables(length: int, dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of position * theta^(-2i/dim), each (length, 1, dim/2) float32."""
    frequency = theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angle = torch.outer(torch.arange(length, dtype=torch.float64), frequency).unsqueeze_(1)
    return angle.cos().float().to(device), angle.sin().float().to(device)
