"""A Llama-style decoder, or any contiguous part of one.

    whole = Transformer(Build(settings.model, seed=0, device=device), range(8))   # plain PyTorch
    loss = whole(tokens, targets, key=(seed, step, g))
    module = part(settings, 1, device)                                            # a pipeline stage, see `stage_module`

RMSNorm, RoPE, grouped-query attention, SwiGLU, untied embedding and head. `model=llama` adds the features of Qwen, and
a tied embedding and head. Activations are (b T, H) matrices. The residual stream is float32, even with bf16 autocast,
which only affects matrix products. With bf16 the stream is bfloat16, like everything except the inside of norms,
attention and loss. All randomness is keyed: initial weights by (seed, module), dropout by (seed, step, g, layer).
Random numbers thus depend neither on the split, nor on the worker, nor on recomputation.

(Longer than other files because it is the whole model, readable from top to bottom.)
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recycle_pp.config.settings import Model, Settings
from recycle_pp.numerics import weight_grad_store as deferred
from recycle_pp.numerics.backends import operations
from recycle_pp.numerics.operations import Operations
from recycle_pp.numerics.weight_grad_store import WeightGradStore

from .llama_names import from_llama, to_llama
from .recompute import recomputed
from .safetensors_folder import Folder, initial
from .split import layers_of
from .stage_module import Batch, Boundary, Key

STD = 0.02  # standard deviation of initial weights


def part(settings: Settings, stage: int, device: torch.device, filled: bool = True) -> TransformerStage:
    """Stage `stage` of the model that `settings` describe. filled: see `Stage`"""
    return TransformerStage(settings, stage, device, filled)


@dataclass
class Build:
    """The context from which modules are built. Layers are ordinary autograd layers until they get a sink."""

    model: Model
    seed: int
    device: torch.device
    stream: torch.dtype = torch.float32  # dtype of the activations between layers
    drawn: bool = True  # whether matrices get random values; False: they are on `meta`, without memory

    def __post_init__(self) -> None:
        self.ops: Operations = operations(self.model.kernels, self.device)

    def normal(self, rows: int, columns: int, std: float, *name: object) -> nn.Parameter:
        """A random matrix (rows, columns) that depends only on (seed, name). It is always drawn on the CPU."""
        if not self.drawn:
            return nn.Parameter(torch.empty(rows, columns, device="meta"))
        random = generator(torch.device("cpu"), self.seed, *name)
        return nn.Parameter(torch.empty(rows, columns).normal_(0, std, generator=random).to(self.device))


def generator(device: torch.device, *key: object) -> torch.Generator:
    """A random generator that depends only on `key`."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)


class Linear(nn.Module):
    """A linear layer without bias. With autocast it caches the bf16 copy of its weight until the weight changes."""

    def __init__(self, build: Build, inputs: int, outputs: int, std: float, *name: object):
        super().__init__()
        self.weight = build.normal(outputs, inputs, std, *name)
        self.sink: WeightGradStore | None = None
        self.index = -1
        self._copy, self._copied = torch.empty(0), -1

    def forward(self, x: Tensor) -> Tensor:
        return deferred.linear(*self.operands(x), self.sink, self.index)

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x and the weight, in the dtype of the product."""
        if self.sink is None or not torch.is_autocast_enabled(x.device.type):
            return x, self.weight.to(x.dtype)
        dtype = torch.get_autocast_dtype(x.device.type)
        if self._copied != self.weight._version:
            self._copy, self._copied = self.weight.detach().to(dtype), self.weight._version
        return x.to(dtype), self._copy


class Head(Linear):
    """The projection to the vocabulary, and its mean loss: a float32 scalar."""

    def __init__(self, build: Build):
        name = "embedding" if build.model.tied else "head"
        super().__init__(build, build.model.width, build.model.vocabulary, STD, name)
        self.loss = build.ops.head_loss

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        return self.loss(*self.operands(x), targets, self.sink, self.index)


class Norm(nn.Module):
    """RMSNorm, fused with the addition of the previous branch. Returns (normalised, residual stream)."""

    def __init__(self, build: Build, width: int | None = None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width or build.model.width, device=build.device))
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


class Bias(nn.Module):
    def __init__(self, build: Build, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(outputs, device=build.device))
        self.sink: WeightGradStore | None = None
        self.index = -1

    def forward(self, y: Tensor) -> Tensor:
        return deferred.bias(y, self.weight.to(y.dtype), self.sink, self.index)


class Attention(nn.Module):
    """Causal attention with `heads` query heads. Each group of `heads / kv_heads` heads shares keys and values."""

    def __init__(self, build: Build, std: float, layer: int):
        super().__init__()
        model = build.model
        self.shape = (model.sequence, model.heads + 2 * model.kv_heads, model.head_size)
        self.heads, self.kv_heads, self.rope_qkv = model.heads, model.kv_heads, build.ops.rope_qkv
        self.wqkv = Linear(build, model.width, self.shape[1] * self.shape[2], STD, "layer", layer, "wqkv")
        self.qkv_bias = Bias(build, self.shape[1] * self.shape[2]) if model.qkv_bias else None
        self.q_norm = Norm(build, model.head_size) if model.qk_norm else None
        self.k_norm = Norm(build, model.head_size) if model.qk_norm else None
        self.wo = Linear(build, model.heads * model.head_size, model.width, std, "layer", layer, "wo")

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        """The output of the attention for x (b T, H), with the same shape.

        cos, sin  see `rope_tables`
        mask      (b, 1, T, T) bool: positions to which each position attends; None: all positions up to its own
        """
        qkv = self.wqkv(x)
        qkv = (qkv if self.qkv_bias is None else self.qkv_bias(qkv)).view(-1, *self.shape)
        if self.q_norm is not None and self.k_norm is not None:
            q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], 2)
            q, k = (
                norm(y.reshape(-1, y.shape[-1]), None)[0].view(y.shape)
                for norm, y in ((self.q_norm, q), (self.k_norm, k))
            )
            qkv = torch.cat([q.to(v.dtype), k.to(v.dtype), v], 2)
        q, k, v = (part.transpose(1, 2) for part in self.rope_qkv(qkv, self.heads, self.kv_heads, cos, sin))
        y = attend(q, k, v, mask)
        return self.wo(y.transpose(1, 2).reshape(len(x), -1))


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """The attention of queries (b, heads, T, d) to keys and values (b, kv_heads, T, d); mask: see `Attention`."""
    groups = q.shape[1] // k.shape[1]
    if groups > 1 and mask is not None and q.is_cuda:
        # On a GPU with a mask, only torch's reference kernel supports groups, and it is slow and needs much memory.
        k, v = (part.unsqueeze(2).expand(-1, -1, groups, -1, -1).flatten(1, 2) for part in (k, v))
        groups = 1
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=groups > 1)


class FeedForward(nn.Module):
    def __init__(self, build: Build, std: float, layer: int):
        super().__init__()
        model, self.swiglu = build.model, build.ops.swiglu
        self.w_gate_up = Linear(build, model.width, 2 * model.ffn, STD, "layer", layer, "w_gate_up")
        self.w_down = Linear(build, model.ffn, model.width, std, "layer", layer, "w_down")

    def forward(self, x: Tensor) -> Tensor:
        return self.w_down(self.swiglu(self.w_gate_up(x)))


Uses = Linear | Norm | Embedding | Bias  # the modules that have one parameter, named `weight`


class Layer(nn.Module):
    """A function (x, branch) -> (x, branch). Each norm adds the previous branch to x. The last branch is returned
    without being added."""

    def __init__(self, build: Build, layer: int):
        super().__init__()
        self.layer, self.dropout = layer, build.model.dropout
        # As in GPT-2, the residual branches of deeper models have smaller initial weights.
        std = STD / (2 * depth(build.model)) ** 0.5
        self.attention_norm = Norm(build)
        self.attention = Attention(build, std, layer)
        self.ffn_norm = Norm(build)
        self.ffn = FeedForward(build, std, layer)

    def forward(
        self, x: Tensor, branch: Tensor | None, cos: Tensor, sin: Tensor, mask: Tensor | None, key: Key | None
    ) -> tuple[Tensor, Tensor]:
        random = generator(x.device, *key, self.layer) if key and self.dropout else None
        y, x = self.attention_norm(x, branch)
        y, x = self.ffn_norm(x, self._drop(self.attention(y, cos, sin, mask), random))
        return x, self._drop(self.ffn(y), random)

    def closed(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, key: Key | None) -> Tensor:
        """The layer as a function of the single tensor x, for recomputation. Adds the last branch to x."""
        return torch.add(*self(x, None, cos, sin, mask, key))

    def _drop(self, x: Tensor, random: torch.Generator | None) -> Tensor:
        if random is None:
            return x
        keep = torch.empty_like(x).bernoulli_(1 - self.dropout, generator=random)
        return x * keep.div_(1 - self.dropout)


class Transformer(nn.Module):
    """The layers `layers` of the model, with the embedding for the first layer and the head for the last.

    Parameter names are those of the full model (`layers.3.attention.wqkv.weight`).
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, build: Build, layers: range):
        super().__init__()
        model = build.model
        self.recompute, self.tied = model.recompute is True, model.tied
        self.embedding = Embedding(build) if layers.start == 0 else None
        self.layers = nn.ModuleDict({str(layer): Layer(build, layer) for layer in layers})
        last = layers.stop == depth(model)
        self.norm = Norm(build) if last else None
        self.head = Head(build) if last else None
        if model.tied and self.head is not None and self.embedding is not None:
            self.head.weight = self.embedding.weight
        cos, sin = rope_tables(model.sequence, model.head_size, model.rope_theta, build.device, model.rope_scaling)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def uses(self) -> Iterator[tuple[str, Uses]]:
        """(full-model name of the parameter, module that uses it), in the order of use. A tied name appears twice if
        embedding and head are both in this part."""
        for name, module in self.named_modules():
            if isinstance(module, Uses):
                yield "embedding.weight" if self.tied and module is self.head else f"{name}.weight", module

    def forward(
        self,
        source: Tensor,
        targets: Tensor | None = None,
        *,
        key: Key | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Runs the layers.

        source     (b, T) int64 tokens for the first part; else (b, T, H), the output of the previous part
        targets    (b, T) int64, for the last part
        key        key of dropout; None: no dropout
        documents  (b, T) int64: the document of each token; attention stays within a document

        Returns (b, T, H) in the dtype of the stream. The last part instead returns a float32 scalar: the mean loss over
        all targets that are not -100.
        """
        shape = source.shape[:2]
        x = source.flatten(0, 1) if self.embedding is None else self.embedding(source.flatten())
        branch, mask = None, None if documents is None else document_mask(documents)
        for layer in self.layers.values():
            assert isinstance(layer, Layer)
            if self.recompute and torch.is_grad_enabled():
                x = recomputed(layer.closed, x, self.cos, self.sin, mask, key)
            else:
                x, branch = layer(x, branch, self.cos, self.sin, mask, key)
        if self.norm is None or self.head is None:
            return (x if branch is None else x + branch).view(*shape, -1)
        assert targets is not None
        return self.head(self.norm(x, branch)[0], targets.flatten())


class TransformerStage:
    """A `StageModule`. The op `W` adds all gradients, including those of norms, which the op `I` has computed."""

    def __init__(self, settings: Settings, stage: int, device: torch.device, filled: bool):
        model, parallel = settings.model, settings.parallel
        layers = layers_of(depth(model), parallel.stages, model.layout)[stage]
        folder = Folder(model.folder) if model.folder and model.init == "weights" else None
        if folder is not None:
            names = [name for parts in to_llama(model).values() for name, _ in parts]
            folder.refuse_others(names, [r"^lm_head\.weight$"] if model.tied else ())
        build = Build(model, settings.run.seed, device, stream_dtype(settings), drawn=filled and folder is None)
        self.module, self.ops = Transformer(build, layers), build.ops
        self._model, self._folder, self._filled, self._undrawn = model, folder, filled, replace(build, drawn=False)
        self._stages, self._masked = parallel.stages, settings.data.masked
        self._stream = Boundary((parallel.microbatch_size, model.sequence, model.width), build.stream)
        self.depth = depth(model)
        self.stays: str | None = None
        self.origin = ""
        self._describe()

    @property
    def recompute(self) -> bool:
        return self.module.recompute

    @recompute.setter
    def recompute(self, again: bool) -> None:
        self.module.recompute = again

    @property
    def all_names(self) -> Collection[str]:
        return to_llama(self._model)

    def bind(
        self, masters: Mapping[str, Tensor] | None, views: Mapping[str, Tensor], sink: WeightGradStore
    ) -> Mapping[str, nn.Parameter]:
        index, leaves = {name: k for k, name in enumerate(self.shapes)}, {}
        for name, module in self.module.uses():
            if name not in leaves:
                if masters is not None and self._filled:
                    value = module.weight.detach() if self._folder is None else self._read(self._folder, name)
                    views[name].copy_(masters[name].copy_(value))
                leaves[name] = nn.Parameter(views[name])
            module.sink, module.index, module.weight = sink, index[name], leaves[name]
        return leaves

    def shapes_of(self, layer: int) -> Mapping[str, Sequence[int]]:
        return {name: of for name, of in self._all_shapes.items() if _layer_of(name, self._model) == layer}

    @cached_property
    def _all_shapes(self) -> Mapping[str, Sequence[int]]:
        whole = Transformer(self._undrawn, range(self.depth))
        return {name: module.weight.shape for name, module in whole.uses()}

    def relayout(self, layers: Sequence[int], stage: int | None = None) -> None:
        module, build = self.module, self._undrawn
        names = [str(layer) for layer in layers if 0 <= layer < self.depth]
        held, first, last = module.layers, names[0] == "0", names[-1] == str(self.depth - 1)
        module.layers = nn.ModuleDict({name: held[name] if name in held else Layer(build, int(name)) for name in names})
        module.embedding = (module.embedding or Embedding(build)) if first else None
        module.norm, module.head = (module.norm or Norm(build), module.head or Head(build)) if last else (None, None)
        self._describe()

    def _describe(self) -> None:
        first, last = self.module.embedding is not None, self.module.head is not None
        self.takes = [] if first else [self._stream]
        self.gives = [] if last else [self._stream]
        self.reads = first or last or self._masked
        tied = self._model.tied and first != last
        self.shared: Mapping[str, Sequence[int]] = {"embedding.weight": [0, self._stages - 1]} if tied else {}
        uses = sorted(self.module.uses(), key=lambda use: _layer_of(use[0], self._model))
        self.shapes: Mapping[str, Sequence[int]] = {name: module.weight.shape for name, module in uses}
        self.frozen: Mapping[str, Sequence[int]] = {}
        self.layers: Mapping[str, int] = {name: _layer_of(name, self._model) for name in self.shapes}
        self.deferred = frozenset(self.shapes)
        self.parts: Mapping[str, int] = Counter(name for name, _ in uses)

    def _read(self, folder: Folder, name: str) -> Tensor:
        return initial(name, from_llama(self._model, name, folder.read), self.shapes[name])

    def __call__(self, batch: Batch | None, boundary: Sequence[Tensor], key: Key | None) -> Sequence[Tensor]:
        if batch is None:
            return [self.module(*boundary, key=key)]
        source, documents = boundary[0] if self.takes else batch.inputs, batch.more.get("document_ids")
        if self.gives:
            return [self.module(source, key=key, documents=documents)]
        return [batch.share_of(self.module(source, batch.labels, key=key, documents=documents))]


def depth(model: Model) -> int:
    """Number of layers of the project's own Transformer."""
    assert isinstance(model.layers, int)
    return model.layers


def document_mask(documents: Tensor) -> Tensor:
    """(b, T) -> (b, 1, T, T) bool: each position attends to the positions of its own document up to itself.

    RoPE depends on differences of positions, so the start position of a document does not matter."""
    return (documents[:, None, :, None] == documents[:, None, None, :]).tril()


def stream_dtype(settings: Settings) -> torch.dtype:
    """The dtype of activations between layers and between stages."""
    return torch.bfloat16 if settings.numerics.precision == "bf16" else torch.float32


def rope_tables(
    length: int, dim: int, theta: float, device: torch.device, scaling: Sequence[float] | None = None
) -> tuple[Tensor, Tensor]:
    """cos and sin of position * theta^(-2i/dim), each (length, 1, dim/2) float32; scaling: see `config.llama`."""
    frequency = _scaled(theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim), scaling)
    angle = torch.outer(torch.arange(length, dtype=torch.float64), frequency).unsqueeze_(1)
    return angle.cos().float().to(device), angle.sin().float().to(device)


def _scaled(frequency: Tensor, scaling: Sequence[float] | None) -> Tensor:
    """Scales frequencies by linear position interpolation (Chen et al. 2023, arXiv:2306.15595) or by the method of
    Llama 3.1. The latter divides frequencies with fewer than `low` rotations in `positions`, keeps those with more than
    `high`, and interpolates in between."""
    if scaling is None:
        return frequency
    factor, *rest = scaling
    if not rest:
        return frequency / factor
    low, high, positions = rest
    share = ((positions * frequency / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
    return (1 - share) * frequency / factor + share * frequency


def _layer_of(name: str, model: Model) -> int:
    """The number of the layer of parameter `name`, see `StageModule.layers`."""
    place = name.split(".")
    if place[0] == "layers":
        return int(place[1])
    return depth(model) if place[0] != "embedding" else depth(model) + 1 if model.tied else -1
