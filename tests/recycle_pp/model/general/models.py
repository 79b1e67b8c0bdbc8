"""Small models for the tests: twelve architectures of transformers, and custom modules."""

import json
import re
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from recycle_pp.config.settings import Settings
from recycle_pp.model.general.part import _seed
from recycle_pp.model.stage_module import Batch
from tests.recycle_pp.in_process import CPU

SIZES = {
    "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GPT2 = {"n_layer": 3, "n_head": 4, "n_embd": 32, "n_positions": 64}
ARCHITECTURES = {
    "gpt2": GPT2 | {"attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1},  # tied, dropout, Conv1D
    "llama": {},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},  # a mixture of experts
    "mamba": {"state_size": 4},  # a state-space model, tied
    "mistral": {},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
    "gemma2": {},  # tied
    "phi3": {},
    "gpt_neox": {"hidden_dropout": 0.1},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.1},  # tied
    "bloom": {"n_layer": 3, "n_head": 4},  # tied
    "mixtral": {"num_local_experts": 4},
    "starcoder2": {"tie_word_embeddings": True},
}
TIED = {"gpt2", "mamba", "qwen3", "gemma2", "opt", "bloom", "starcoder2"}


def folder(kind, at, **changes):
    """A folder with the configuration of a tiny model of that architecture."""
    from transformers import AutoConfig

    AutoConfig.for_model(kind, **{**SIZES, **ARCHITECTURES.get(kind, {}), **changes}).save_pretrained(at)
    return at


def with_weights(kind, at, **changes):
    """A folder with a tiny model of that architecture and its weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder(kind, at, **changes))
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(config).save_pretrained(at)
    return at


def of_folder(path, stages=1, **changes):
    return settings({"kind": "hf", "path": str(path), "init": "random", "layers": None}, stages, **changes)


def of_function(build, stages=1, layers="blocks", **changes):
    """Settings for a model built by a function of this file."""
    return settings({"kind": "custom", "build": f"{__name__}:{build}", "layers": layers}, stages, **changes)


def settings(model, stages, **changes):
    """Settings of one pipeline with four micro-batches of two samples. changes: `group__key=value`."""
    defaults = {f"model__{key}": value for key, value in model.items()} | {
        "model__sequence": 16, "parallel__pipelines": 1, "parallel__stages": stages, "parallel__microbatches": 4,
        "run__steps": 4, "optimizer__warmup": 1, "numerics__reproducible": False,
        "data__path": str(Path(json.__file__).with_name("decoder.py")),
    }  # fmt: skip
    return Settings().with_values({path.replace("__", "."): value for path, value in (defaults | changes).items()})


def batch(seed=5, vocabulary=256, **more):
    random = torch.Generator().manual_seed(seed)
    inputs, labels = (torch.randint(3, vocabulary, (2, 16), generator=random) for _ in range(2))
    return Batch(inputs, labels, more=more)


def seeded_layers(layers, key):
    """Seeds the dropout of an unmodified model by (seed, step, g, layer), as the exactness contract demands."""
    for k, layer in enumerate(layers):
        if k:
            layer.register_forward_pre_hook(lambda *_, k=k: _seed(CPU, *key, k))
    _seed(CPU, *key, 0)


class Block(nn.Module):
    def __init__(self, width=16, dropout=0.0):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 32), nn.Linear(32, width)
        self.dropout = dropout

    def forward(self, x, *rest):
        y = self.down(F.gelu(self.up(self.norm(x))))
        return x + F.dropout(y, self.dropout, self.training)


class Plain(nn.Module):
    """The base class of the models below, each of which adds something that is hard to split."""

    def __init__(self, vocabulary=256, width=16, layers=3):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, dropout=0.1) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens, labels):
        return self.loss(self.run(self.embedding(tokens)), labels)

    def run(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def loss(self, x, labels):
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), labels.flatten())


class TiedByHand(Plain):
    """A parameter with one name, used before the first layer and after the last one."""

    def __init__(self):
        super().__init__()
        del self.head

    def loss(self, x, labels):
        return F.cross_entropy((x @ self.embedding.weight.T).flatten(0, 1).float(), labels.flatten())


class SharedLayer(Plain):
    """The same block as every layer, as in a Universal Transformer."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block()] * 4)


class Routed(Plain):
    """Stages exchange a float tensor, an integer tensor and a mask; one of them is passed twice."""

    class Block(Block):
        def forward(self, x, seen, where, again):
            x = super().forward(x)
            chosen = x.argmax(-1) + seen
            return torch.where(where[..., None], x, x + again), chosen % 7, chosen % 2 == 0

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(4))

    def run(self, x):
        seen, where = x.argmax(-1), x[..., 0] > 0
        for block in self.blocks:
            x, seen, where = block(x, seen=seen, where=where, again=x)
        return x


class Movable(Routed):
    """Five layers that can move. The embedding is also used after the last one."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(self.Block(dropout=0.1) for _ in range(5))
        del self.head

    loss = TiedByHand.loss


class Activations(Plain):
    """A layer without parameters."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), nn.GELU(), Block()])


class Widening(Plain):
    """Layers that take tensors of different shapes."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(16, 24), nn.Linear(24, 32), nn.Linear(32, 16)])


class Bare(Plain):
    """Parameters of the root module, also used between the layers."""

    def __init__(self):
        super().__init__()
        self.start, self.scales = nn.Parameter(torch.ones(16)), nn.Parameter(torch.ones(3))

    def run(self, x):
        x = x + self.start
        for k, block in enumerate(self.blocks):
            x = block(x) * self.scales[k]
        return x


class Skips(Plain):
    """A skip connection from the first layer past the last one: the model cannot be split in between."""

    def run(self, x):
        first = x = self.blocks[0](x)
        for block in list(self.blocks)[1:]:
            x = block(x)
        return x + first


class SkipsTwo(Plain):
    """A skip connection that allows some splits."""

    def __init__(self):
        super().__init__(layers=4)

    def run(self, x):
        a, b, c, d = self.blocks
        x = a(x)
        x = x + b(x)
        return d(c(x))


class Inputs(Plain):
    """A tensor made before the layers, with a slice for each layer."""

    def __init__(self):
        super().__init__()
        self.for_layers = nn.Embedding(256, 3 * 16)

    def forward(self, tokens, labels):
        x, each = self.embedding(tokens), self.for_layers(tokens).chunk(3, -1)
        for block, more in zip(self.blocks, each, strict=True):
            x = block(x + more)
        return self.loss(x, labels)


class Normed(Plain):
    def __init__(self):
        super().__init__()
        self.blocks[1].norm = nn.Sequential(nn.Flatten(0, 1), nn.BatchNorm1d(16), nn.Unflatten(0, (2, 16)))


class Counting(Plain):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def run(self, x):
        self.calls += 1
        return super().run(x)


class Frozen(Plain):
    def __init__(self):
        super().__init__()
        self.embedding.requires_grad_(False)


class Unused(Plain):
    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(16, 16)


class Backwards(Plain):
    def run(self, x):
        for block in reversed(self.blocks):
            x = block(x)
        return x


class Looking(Plain):
    def run(self, x):
        return super().run(x) if x.sum() > 0 else x


class Half(Plain):
    def __init__(self):
        super().__init__()
        self.head.half()


class RoughLoss(Plain):
    def loss(self, x, labels):
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()).bfloat16()


class Logits(Plain):
    def forward(self, tokens):
        return self.head(self.run(self.embedding(tokens)))


def of_logits(output, batch):
    return F.cross_entropy(output.flatten(0, 1), batch.labels.flatten())


def of_logits_by_items(output, batch):
    return F.cross_entropy(output.flatten(0, 1), batch.labels.flatten(), reduction="sum") / batch.items


def of_logits_by_hand(output, batch):
    counts = batch.labels != -100
    losses = F.cross_entropy(output.flatten(0, 1), batch.labels.flatten(), reduction="none")
    return (losses * counts.flatten()).sum() / counts.sum()


def forgets_the_labels(output, batch):
    return output.mean()


def documented():
    """The module in docs/models.md."""
    text = (Path(__file__).parents[4] / "docs" / "models.md").read_text()
    names = {}
    exec(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], names)
    return names["Model"]()
