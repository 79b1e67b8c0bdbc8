"""A stage of any model: the model's own forward, with placeholders for the parts of other stages.

    module = part(settings, stage, device, run_dir)        # a `StageModule`

The whole model is built with parameters that have no memory. Then memory is allocated for the parameters of this stage.
The model's forward runs unchanged. Modules and layers of earlier stages return cached zeros of the right shape. At the
first layer of this stage the boundary tensors replace the arguments. The call of the first layer of the next stage ends
the forward. Functions of the batch (masks, positions) are computed by the model's own code on every stage.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from recycle_pp.comm.tensor_bytes import aligned_bytes
from recycle_pp.config.settings import Settings
from recycle_pp.data.batches import blank
from recycle_pp.model.safetensors_folder import Folder, folder_digest, initial
from recycle_pp.model.split import layers_of as split_layers
from recycle_pp.model.stage_module import IGNORED, Batch, Boundary, Key
from recycle_pp.numerics.backends import operations
from recycle_pp.numerics.weight_grad_store import WeightGradStore

from .deferred import defer
from .dry_run import Argument, Outline, dry_run, layers_of, outside, same_arguments
from .empty import empty, unshare
from .initial_values import Values, initial_values
from .label_shift import LabelShift
from .lora import in_folder
from .source import HuggingFace, Source, source_of

Place = tuple[nn.Module, str, nn.Parameter | None]
"""A module, the name of a parameter, and the parameter itself."""


def part(settings: Settings, stage: int, device: torch.device, run_dir: str | Path | None) -> Part:
    """Stage `stage` of the model in `settings`. Raises ValueError, with one sentence for users, if the model cannot be
    trained in stages."""
    source, parallel = source_of(settings), settings.parallel
    outline = dry_run(source, blank(settings), settings.numerics.precision == "bf16-autocast")
    if isinstance(source, HuggingFace) and source.folder is not None:
        names = {in_folder(name) for name in outline.canonical}
        Folder(source.folder, source.prefix).refuse_others(names, source.ignored)
    layout = split_layers(len(outline.layers), parallel.stages, settings.model.layout)
    for k, layers in enumerate(layout):
        outline.refuse(layers)
        if not outline.names_of(layers):
            raise ValueError(
                f"stage {k} has nothing to train: all parameters of {outline.layers[layers.start]} to "
                f"{outline.layers[layers.stop - 1]} are frozen; model.split can give each stage a layer that is not"
            )
    return Part(settings, source, outline, layout, stage, device, initial_values(source, settings, run_dir))


class Part:
    """A `StageModule`. layout: the layers of every stage."""

    reads = True

    def __init__(
        self,
        settings: Settings,
        source: Source,
        outline: Outline,
        layout: Sequence[range],
        stage: int,
        device: torch.device,
        values: Values,
    ) -> None:
        self._source, self._outline, self._values, self._device = source, outline, values, device
        self.recompute, self.ops = settings.model.recompute is True, operations(settings.model.kernels, device)
        self.depth, self.stays = len(outline.layers), outline.stays
        self._layout, held = layout, [{*outline.names_of(layers)} for layers in layout]
        self._holders = {name: [k for k, names in enumerate(held) if name in names] for name in outline.shapes}
        self._describe(layout[stage])
        self.deferred: frozenset[str] = frozenset()
        self._zeros: dict[Boundary, Tensor] = {}
        self._leaves: dict[int, list[Place]] = defaultdict(list)  # by region (`dry_run`)
        self._absent: list[Place] = []  # the parameters of this stage as they were before `bind`
        self._read: dict[str, Tensor] = {}  # the frozen parameters of this stage
        self.origin = folder_digest(source.folder) if outline.frozen and source.folder else ""
        self.model = self._empty_model()
        self._autocast = settings.numerics.precision == "bf16-autocast"
        custom = settings.model.kind == "custom" and settings.data.build is None and not self._exit
        self._shift = LabelShift(source.name, settings.model.vocabulary, self._loss_of) if custom else None

    @property
    def all_names(self) -> Collection[str]:
        return self._outline.shapes

    def _describe(self, layers: range) -> None:
        outline = self._outline
        self._layers, held = layers, outline.names_of(layers)
        self.shapes: Mapping[str, Sequence[int]] = {name: outline.shapes[name] for name in held}
        self.frozen: Mapping[str, Sequence[int]] = {name: outline.frozen[name] for name in outline.frozen_of(layers)}
        self.shared: Mapping[str, Sequence[int]] = {name: of for name in held if len(of := self._holders[name]) > 1}
        self.layers: Mapping[str, int] = {name: outline.layer_of[name] for name in held}
        self.parts: Mapping[str, int] = {name: outline.parts[name] for name in held}
        self._entry, self._exit = outline.boundary(layers.start), outline.boundary(layers.stop)
        self.takes = [of for _, of in self._entry]
        self.gives = [of for _, of in self._exit]

    def shapes_of(self, layer: int) -> Mapping[str, Sequence[int]]:
        of = self._outline.layer_of
        return {name: shape for name, shape in self._outline.shapes.items() if of[name] == layer}

    def relayout(self, layers: Sequence[int], stage: int | None = None) -> None:
        if self.stays is None:
            inside = [layer for layer in layers if 0 <= layer < self.depth]
            mine = range(inside[0], inside[-1] + 1)
        elif stage is None:
            raise ValueError(self.stays)
        else:
            mine = self._layout[stage]
        for module, attribute, parameter in self._absent:
            module._parameters[attribute] = parameter
        self._describe(mine)

    def bind(
        self, masters: Mapping[str, Tensor] | None, views: Mapping[str, Tensor], sink: WeightGradStore
    ) -> Mapping[str, nn.Parameter]:
        index = {name: k for k, name in enumerate(self.shapes)}
        for name, master in masters.items() if masters is not None else ():
            views[name].copy_(master.copy_(self._initial(name, master.shape)))
        self._read = {name: of for name, of in self._read.items() if name in self.frozen}  # frees the others
        self._read |= {name: self._fixed(name) for name in self.frozen if name not in self._read}
        uses = {name: sorted(self._outline.regions[name] & set(self._layers)) for name in list(self._outline.regions)}
        places = {name: self._outline.canonical[name] for name, regions in uses.items() if regions}
        leaves = {of: nn.Parameter(views[of]) for of in views}
        self._leaves.clear()
        self._absent = []
        for name, of in places.items():
            module, attribute = self._place(name)
            self._absent.append((module, attribute, module._parameters[attribute]))
            if of in self._read:
                module._parameters[attribute] = nn.Parameter(self._read[of], requires_grad=False)
                continue
            for region in uses[name]:
                # Each use gets its own leaf, so that the sum over the uses is the same for any layout.
                leaf = nn.Parameter(views[of])
                leaf.register_post_accumulate_grad_hook(partial(_take, sink, index[of]))
                self._leaves[region].append((module, attribute, leaf))
                module._parameters[attribute] = leaf
        ways = defer(self.model, {name: index[of] for name, of in places.items() if of in index}, sink)
        self.deferred = frozenset(
            of for of in views if all(name in ways for name, first in places.items() if first == of)
        )
        self._several = {r for r, uses in self._leaves.items() if any(self._is_switched(use) for use in uses)}
        if masters is not None:
            self._install()
        return leaves

    def __call__(self, batch: Batch | None, boundary: Sequence[Tensor], key: Key | None) -> Sequence[Tensor]:
        assert batch is not None
        if self.model.training != (key is not None):
            self.model.train(key is not None)
        self._key, self._given, self._inside, self._counts = key, boundary, 0, Counter[str]()
        self._batch = batch
        self._begin(0)
        items = None
        if self._outline.weighs:  # at least one item, because without any label the sum of the losses is 0
            count = (batch.labels != IGNORED).sum().float().clamp(min=1)
            items = count if batch.items is None else torch.tensor(batch.items or 1.0)
        elif batch.counted == 0:  # labels of 0 avoid the mean over no label, a NaN; `share_of` multiplies the loss by 0
            batch = replace(batch, labels=torch.zeros_like(batch.labels))
        try:
            loss = self._source.loss(self.model, batch, items, batch.labels)
        except _Leave as leave:
            return leave.boundary
        if self._exit:
            raise RuntimeError(f"the forward has ended before {self._outline.layers[self._layers.stop]}")
        return [loss if self._outline.weighs else batch.share_of(loss)]

    # -- the model, with memory for this stage only

    def _empty_model(self) -> nn.Module:
        model = empty(self._source)
        unshare(model)
        for name, buffer in list(model.named_buffers()):
            owner, _, attribute = name.rpartition(".")
            value = self._values.find(self._outline.canonical[name])
            if value is not None and value.shape == buffer.shape:
                buffer = value.to(buffer.dtype).clone()
            model.get_submodule(owner)._buffers[attribute] = buffer.to(self._device)
        for name in self._outline.bare:  # used by code outside the modules, which runs on every stage
            owner, _, attribute = name.rpartition(".")
            zero = torch.zeros((), dtype=self._source.dtype, device=self._device)
            of = self._outline.canonical[name]
            zeros = zero.expand((self._outline.shapes | self._outline.frozen)[of])
            model.get_submodule(owner)._parameters[attribute] = nn.Parameter(zeros, requires_grad=False)
        return model

    def _fixed(self, name: str) -> Tensor:
        """A frozen parameter on the device, in the dtype of the computation, aligned like trained parameters."""
        shape, dtype = self.frozen[name], self._source.dtype
        memory = aligned_bytes(prod(shape) * dtype.itemsize, self._device).view(dtype).view(*shape)
        return memory.copy_(self._initial(name, shape))

    def _initial(self, name: str, shape: Sequence[int]) -> Tensor:
        """The initial value of a parameter. A file may contain a tied parameter under any of its names."""
        names = [other for other, first in self._outline.canonical.items() if first == name]
        value = next((found for other in names if (found := self._values.find(other)) is not None), None)
        return initial(name, self._values.read(name) if value is None else value, shape)

    def _place(self, name: str) -> tuple[nn.Module, str]:
        owner, _, attribute = name.rpartition(".")
        return self.model.get_submodule(owner), attribute

    def _is_switched(self, use: Place) -> bool:
        module, attribute, _ = use
        return sum((m, a) == (module, attribute) for uses in self._leaves.values() for m, a, _ in uses) > 1

    def _install(self) -> None:
        """Wraps the layers, and the modules with parameters outside of layers. The wrappers call only the modules of
        this stage."""
        container = layers_of(self.model, self._source.layers)
        for name, module in outside(self.model, container):
            module.forward = partial(self._call, name, module.forward)
        for k, layer in enumerate(container.children()):
            layer.forward = partial(self._call_layer, k, layer.forward)

    # -- while the forward runs

    def _begin(self, region: int) -> None:
        """Starts a region. Seeds dropout by (seed, step, g, layer), so it does not depend on layout or
        recomputation."""
        self._region = region
        if region in self._several:
            for module, attribute, leaf in self._leaves[region]:
                module._parameters[attribute] = leaf
        if self._key is not None:
            _seed(self._device, *self._key, region)

    def _call(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._inside or self._region in self._layers:
            self._inside += 1
            result = forward(*args, **kwargs)
            self._inside -= 1
            return result
        described = self._outline.returns[name][self._counts[name]]
        self._counts[name] += 1
        given = tree_leaves((args, kwargs))

        def stand_in(of: Any) -> Any:
            return given[of.place] if isinstance(of, Argument) else self._zero(of) if isinstance(of, Boundary) else of

        return tree_map(stand_in, described)

    def _call_layer(self, k: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        if k == self._layers.stop:
            raise _Leave(same_arguments(leaves, self._exit))
        if k:
            self._begin(k)
        if k == self._layers.start and k:
            same_arguments(leaves, self._entry)
            for (places, _), tensor in zip(self._entry, self._given, strict=True):
                for place in places:
                    leaves[place] = tensor
            args, kwargs = tree_unflatten(leaves, spec)
        if self._shift is not None and k == len(self._outline.layers) - 1 and torch.is_grad_enabled():
            self._shift.watch(tree_leaves((args, kwargs)), self._batch, self._given)
        if self.recompute and torch.is_grad_enabled() and k in self._layers:
            from torch.utils.checkpoint import checkpoint

            # Recomputation must not run this method again, because another micro-batch is then the current one.
            again = partial(checkpoint, forward, use_reentrant=False)
            return self._call(self._outline.layers[k], again, *args, **kwargs)
        return self._call(self._outline.layers[k], forward, *args, **kwargs)

    def _loss_of(self, batch: Batch, boundary: Sequence[Tensor]) -> Tensor:
        """The loss, computed during a backward with the autocast mode of the forward. Leaves the model in training
        mode."""
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._autocast):
            (loss,) = self(batch, boundary, None)
        self.model.train()
        return loss

    def _zero(self, of: Boundary) -> Tensor:
        if of not in self._zeros:
            self._zeros[of] = of.empty(self._device).zero_()
        return self._zeros[of]


class _Leave(Exception):
    """Ends the forward. Raised instead of calling the layer after the stage's last layer."""

    def __init__(self, boundary: Sequence[Tensor]) -> None:
        super().__init__()
        self.boundary = boundary


def _take(sink: WeightGradStore, index: int, leaf: Tensor) -> None:
    if leaf.grad is not None:  # None: the gradient waits for W
        sink.gradients.add(index, leaf.grad)
        leaf.grad = None


def _seed(device: torch.device, *key: int) -> None:
    digest = hashlib.sha256(repr(key).encode()).digest()
    number = int.from_bytes(digest[:8], "little") >> 1
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.manual_seed(number)
