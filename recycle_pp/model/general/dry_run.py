"""The data flow between a model's layers, from one run on fake tensors, which takes a second for a 70B model.

    outline = dry_run(source, batch, autocast=False)
    outline.boundary(4)           # tensors that cross the cut before layer 4: [(argument places, Boundary), ...]
    outline.names_of(range(4, 8)) # the parameters that a stage with these layers holds
    outline.refuse(range(4, 8))   # raises ValueError if a stage cannot start with layer 4

The run is divided into regions. Region k lasts from the call of layer k to the call of layer k+1. Region 0 also
includes everything before layer 0. The last region also includes everything after the last layer.

A value is *made* if it depends on a parameter. All other values (masks, positions, rotary tables) are functions of the
batch, which every stage computes with the model's own code. A stage that starts with layer k receives the made values
among the arguments of layer k: this is the boundary. If region k or a later region uses any other value made before
layer k (a loss over all layers, a skip connection, inputs for each layer), no stage can start with layer k. Such a cut
would train a different model, and is rejected.

(Longer than other files because the origin of a value depends on all earlier operations of the run.)
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from recycle_pp.comm.device_errors import is_out_of_memory
from recycle_pp.config.mistakes import UserMistake
from recycle_pp.data.user_code import raised_here, shown
from recycle_pp.model.stage_module import Batch, Boundary

from .empty import empty, make_fake, unshare
from .source import Source


@dataclass(frozen=True)
class Argument:
    """A result of a call that is one of the call's own arguments.

    place: index of the argument among the leaves of (args, kwargs)
    """

    place: int


Crossing = tuple[list[int], Boundary]  # places of a tensor among the leaves of (args, kwargs), and its description


@dataclass
class Outline:
    """The data flow of the run.

    layers      the full names of the layers, in the order of their calls
    shapes      canonical name -> shape of every trainable parameter, in the order of use
    frozen      canonical name -> shape of every other parameter
    canonical   every name of a parameter or buffer -> its canonical name, the first of the names of a tied tensor
    regions     every name of a parameter -> the regions that use it by this name
    parts       canonical name -> number of addends of its gradient (one for every operation on it)
    returns     name of a layer, or of a module with parameters outside the layers -> results of its calls, in order
    bare        the names of parameters that are used outside the modules that own them
    crossing    layer -> the made tensors among its arguments
    joined      layer -> the reason why no stage may start with it
    weighs      whether the loss divides by `num_items_in_batch`
    """

    layers: list[str] = field(default_factory=list)
    shapes: dict[str, torch.Size] = field(default_factory=dict)
    frozen: dict[str, torch.Size] = field(default_factory=dict)
    canonical: dict[str, str] = field(default_factory=dict)
    regions: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    parts: Counter[str] = field(default_factory=Counter)
    returns: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    bare: set[str] = field(default_factory=set)
    crossing: dict[int, list[Crossing]] = field(default_factory=dict)
    joined: dict[int, str] = field(default_factory=dict)
    weighs: bool = False

    def boundary(self, layer: int) -> list[Crossing]:
        """The distinct tensors that cross the cut before layer `layer`; empty before the first and after the last
        layer."""
        return self.crossing[layer] if 0 < layer < len(self.layers) else []

    def names_of(self, layers: range) -> list[str]:
        """Canonical names of the trainable parameters that a stage with these layers uses."""
        used = self._used(layers)
        return [name for name in self.shapes if name in used]

    def frozen_of(self, layers: range) -> list[str]:
        """Canonical names of the frozen parameters that a stage with these layers uses."""
        used = self._used(layers)
        return [name for name in self.frozen if name in used]

    def _used(self, layers: range) -> set[str]:
        return {self.canonical[name] for name, regions in self.regions.items() if regions & set(layers)}

    @cached_property
    def layer_of(self) -> dict[str, int]:
        """Canonical name of a parameter -> its layer, see `StageModule.layers`. Use it only after the dry run,
        because the value is cached."""
        names: dict[str, list[str]] = defaultdict(list)
        for name, first in self.canonical.items():
            names[first].append(name)
        found, last = {}, len(self.layers) - 1
        shared = count(last + 2)
        for first, others in names.items():
            regions = {region for name in others for region in self.regions.get(name, ())} or {last}
            region = min(regions)
            if len(regions) > 1:
                found[first] = next(shared)
            elif 0 < region < last or any(name.startswith(f"{self.layers[region]}.") for name in others):
                found[first] = region
            else:
                found[first] = -1 if region == 0 else last + 1
        return found

    @cached_property
    def stays(self) -> str | None:
        """The reason why layers cannot move, see `StageModule.stays`. Valid only after the run."""
        why, depth = None, len(self.layers)
        for k in range(2, depth):
            if [of for _, of in self.crossing[k]] != [of for _, of in self.crossing[1]]:
                why = f"{self.layers[k]} takes different tensors than {self.layers[1]}"
        trained = {self.layer_of[name] for name in self.shapes}
        if alone := [name for k, name in enumerate(self.layers) if k not in trained]:
            why = f"{alone[0]} has no parameters of its own to train"
        for name, first in self.canonical.items():
            if self.layer_of[first] > depth and not self.regions.get(name, set()) <= {0, depth - 1}:
                why = f"several layers share {first}"
        for layer, reason in self.joined.items():
            why = f"no stage may start with {self.layers[layer]}: {reason}"
        return why and f"the layers of this model cannot move between stages while it trains: {why}"

    def refuse(self, layers: range) -> None:
        if (why := self.joined.get(layers.start)) is not None:
            free = [k for k in range(1, len(self.layers)) if k not in self.joined]
            allowed = (
                f"possible first layers: {', '.join(map(str, free))} (model.split)" if free else "use parallel.stages=1"
            )
            raise ValueError(f"no stage may start with {self.layers[layers.start]}: {why}; {allowed}")


def dry_run(source: Source, batch: Batch, autocast: bool = False) -> Outline:
    """Runs forward and loss on fake tensors of the batch's shapes. Returns the data flow.

    Raises ValueError, with one sentence for the user, if the model cannot be trained in stages.
    """
    from torch._subclasses import FakeTensorMode

    outline = Outline()
    model = empty(source, traced=True)
    outline.canonical = unshare(model)
    container = layers_of(model, source.layers)
    outline.layers = [f"{source.layers}.{name}" for name, _ in container.named_children()]
    _refuse_unsplittable(model, source.dtype)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        make_fake(model, fake)
        inputs, labels = (fake.from_tensor(tensor.clone()) for tensor in (batch.inputs, batch.labels))
        items = fake.from_tensor(torch.ones(()))
        watch = _Watch(outline, model, container)
        given = Batch(
            inputs, labels, float(labels.numel()), {name: fake.from_tensor(t) for name, t in batch.more.items()}
        )
        other = fake.from_tensor(batch.labels.clone())
        with watch, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            try:
                loss = source.loss(model, given, items, other)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                raise _mistake(source, error) from error
        watch.finish(loss)
    outline.weighs = watch.used(items)
    if watch.used(other):
        raise ValueError(f"{source.name} shifts its labels itself; its loss must take `shift_labels` as they are")
    if labels.numel() and not watch.used(labels):
        raise ValueError(f"{source.name}: its loss does not depend on the labels")
    ordered = sorted(watch.shapes, key=outline.layer_of.__getitem__)
    outline.frozen = {name: watch.shapes[name] for name in ordered if name in watch.frozen}
    outline.shapes = {name: watch.shapes[name] for name in ordered if name not in watch.frozen}
    if outline.frozen and source.folder is None:
        name = next(iter(outline.frozen))
        raise ValueError(f"{name} is frozen, so checkpoints lack it: model.path must name a folder of safetensors")
    return outline


def layers_of(model: nn.Module, name: str) -> nn.Module:
    """The model's list of layers. Raises ValueError if `name` does not name a non-empty list of modules."""
    with suppress(AttributeError):
        container = model.get_submodule(name)
        if name and isinstance(container, nn.ModuleList | nn.ModuleDict | nn.Sequential) and len(container):
            return container
    lists = [n for n, m in model.named_modules() if isinstance(m, nn.ModuleList | nn.Sequential) and len(m)]
    known = f"its lists are {', '.join(lists)}" if lists else "it has none"
    raise ValueError(f"model.layers: {name!r} is not a list of layers of the model; {known}")


def outside(model: nn.Module, container: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    """(name, module) for each module with parameters that neither contains the layers nor is part of a layer."""
    inner = {id(module) for module in container.modules()}
    at = next(name for name, module in model.named_modules() if module is container)
    for name, module in model.named_modules():
        holds = not name or at == name or at.startswith(f"{name}.")
        if not holds and id(module) not in inner and next(module.parameters(), None) is not None:
            yield name, module


class _Watch(TorchDispatchMode):
    """Records every operation of the run: its inputs, its results, and its region."""

    def __init__(self, outline: Outline, model: nn.Module, container: nn.Module) -> None:
        super().__init__()
        self._outline, self._model = outline, model
        self._region, self._calls = 0, 0
        self._inside = 0  # depth of module calls
        self._quiet = False
        self._made: dict[int, int] = {}  # storage -> the region that wrote it last
        self._read: set[int] = set()
        self._kept: list[Any] = []  # keeps storages alive, so that their addresses are not reused
        named = [(name, p) for name, p in model.named_parameters() if outline.canonical[name] == name]
        self.shapes = {name: p.shape for name, p in named}
        self.frozen = {name for name, p in named if not p.requires_grad}
        self._parameters = {_storage(p): name for name, p in _all(model.named_parameters)}
        self._buffers = {_storage(b): n for n, b in _all(model.named_buffers)}
        self._held = {name: id(buffer) for name, buffer in _all(model.named_buffers)}
        for name, module in outside(model, container):
            module.forward = self._module(name, module.forward)
        for k, layer in enumerate(container.children()):
            layer.forward = self._layer(k, layer.forward)

    def used(self, tensor: Tensor) -> bool:
        return _storage(tensor) in self._read

    def finish(self, loss: Any) -> None:
        """Checks the run after the loss has been computed. Raises ValueError if the model cannot be trained."""
        outline = self._outline
        if not isinstance(loss, Tensor) or loss.shape != () or not loss.is_floating_point():
            what = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(
                f"the loss must be a scalar tensor, not {what}; model.loss can name a function that computes one"
            )
        if loss.dtype != torch.float32:
            raise ValueError(f"the loss is {_name(loss.dtype)} and must be float32; compute it from logits.float()")
        if self._calls != len(outline.layers):
            raise ValueError(f"{outline.layers[self._calls]} is never called: each layer must run once, in order")
        for name, buffer in _all(self._model.named_buffers):
            if self._held.get(name, id(buffer)) != id(buffer):
                raise ValueError(_changes(name))
        ends = [self._parameters.get(_storage(leaf)) for leaf in _leaves(loss)]
        reached = {outline.canonical[name] for name in ends if name is not None}
        for name in self.shapes:
            if name not in self.frozen | reached:
                raise ValueError(f"no gradient would reach {name}: the loss does not depend on it")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self._quiet:
            return out
        results = {_storage(tensor) for tensor in _tensors(out)}
        made = False
        for tensor in _tensors((*args, *(kwargs or {}).values())):
            made |= self._uses(tensor, _storage(tensor) in results)
        if func._schema.is_mutable:
            self._writes(func._schema.arguments, args)
        if made and func.overloadpacket.__name__ not in _SHAPE_ONLY:
            for tensor in _tensors(out):
                self._mark(tensor)
        return out

    def _writes(self, arguments: Sequence[Any], values: Sequence[Any]) -> None:
        for argument, value in zip(arguments, values, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in _tensors(value):
                    if _storage(tensor) in self._buffers:
                        raise ValueError(_changes(self._buffers[_storage(tensor)]))

    def _uses(self, tensor: Tensor, view: bool) -> bool:
        """Records that an operation uses `tensor`. Returns whether the operation's result is therefore a made value.

        view: whether a result shares memory with `tensor`
        """
        key, outline = _storage(tensor), self._outline
        self._read.add(key)
        if (name := self._parameters.get(key)) is not None:
            outline.regions[name].add(self._region)
            outline.parts[outline.canonical[name]] += not view
            if not self._inside:
                outline.bare.add(name)
            return True
        if (since := self._made.get(key)) is None:
            return False
        for k in range(since + 1, self._region + 1):
            where = f"{'' if self._inside else 'the part after '}{outline.layers[self._region]}"
            outline.joined.setdefault(k, f"{where} uses an earlier tensor that is not among its arguments")
        return True

    def _mark(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._parameters:
            self._made[storage._cdata] = self._region
            self._kept.append(storage)

    def _module(self, name: str, forward: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return forward(*args, **kwargs)
            given = tree_leaves((args, kwargs))
            self._inside += 1
            out = forward(*args, **kwargs)
            self._inside -= 1

            def described(leaf: Any) -> Any:
                if not isinstance(leaf, Tensor):
                    return leaf
                for place, argument in enumerate(given):
                    if argument is leaf and _storage(leaf) not in self._made:
                        return Argument(place)
                self._mark(leaf)  # even if it depends on no parameter, because other stages use zeros in its place
                return Boundary(tuple(leaf.shape), leaf.dtype)

            self._outline.returns[name].append(tree_map(described, out))
            return out

        return call

    def _layer(self, k: int, forward: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            layers = self._outline.layers
            if k != self._calls or self._inside:
                raise ValueError(f"{layers[k]} is called out of turn: each layer must run once, in order")
            self._calls, self._region = k + 1, k
            args, kwargs = self._cut(k, args, kwargs)
            return inner(*args, **kwargs)

        inner = self._module(self._outline.layers[k], forward)
        return call

    def _cut(self, k: int, args: Any, kwargs: Any) -> Any:
        """Replaces the made arguments of layer k with copies that count as made in this region, because a stage may
        start with this layer. Returns the new (args, kwargs)."""
        leaves, spec = tree_flatten((args, kwargs))
        crossing: dict[int, Crossing] = {}
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and _storage(leaf) in self._made:
                of = Boundary(tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
                crossing.setdefault(id(leaf), ([], of))[0].append(place)
        for places, _ in crossing.values():
            self._quiet = True
            fresh = leaves[places[0]].clone()
            self._quiet = False
            self._mark(fresh)
            for place in places:
                leaves[place] = fresh
        self._outline.crossing[k] = list(crossing.values())
        return tree_unflatten(leaves, spec)


_SHAPE_ONLY = {"zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like"}
_SHAPE_ONLY |= {"new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided"}


def _tensors(values: Any) -> Iterable[Tensor]:
    """The tensors in the arguments or results of an operation. Searches only lists and tuples, which is much faster
    than pytrees."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _all(named: Any) -> list[tuple[str, Tensor]]:
    return list(named(remove_duplicate=False))


def _leaves(loss: Tensor) -> Iterable[Tensor]:
    """The parameters at the leaves of the graph of `loss`."""
    todo, seen = [loss.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        todo += [following for following, _ in node.next_functions]


def _refuse_unsplittable(model: nn.Module, dtype: torch.dtype) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats:
            raise ValueError(_changes(f"{name}.running_mean"))
    for name, parameter in model.named_parameters():
        if parameter.dtype != dtype:
            raise ValueError(
                f"{name} is {_name(parameter.dtype)}; with this numerics.precision parameters must be {_name(dtype)}, "
                "because they are trained in it"
            )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _changes(name: str) -> str:
    return f"forward changes the buffer {name}: its value would differ between workers (different micro-batches)"


def _mistake(source: Source, error: Exception) -> ValueError:
    """The exception for a failure of forward or loss on fake tensors."""
    if raised_here(error):
        return UserMistake(str(error))
    if _needs_values(error):
        return UserMistake(
            f"{source.name} cannot run on tensors without values, so its Python code depends on values: its "
            f"forward or loss raised {shown(error)}"
        )
    return UserMistake(f"{source.name}: its forward or loss raised {shown(error)}")


def _needs_values(error: Exception) -> bool:
    """Whether the code asked a fake tensor for something that requires values."""
    from torch._subclasses import fake_tensor as fake

    kinds = (fake.DataDependentOutputException, fake.DynamicOutputShapeException, fake.UnsupportedFakeTensorException)
    said = any(words in str(error) for words in ("data-dependent", "tensor subclasses", "FakeTensor"))
    return isinstance(error, kinds) or said


def same_arguments(leaves: Sequence[Any], boundary: Sequence[Crossing]) -> list[Tensor]:
    """The tensors in `leaves` that cross the boundary. Raises RuntimeError if a shape or dtype differs from that in the
    dry run."""
    found = []
    for places, of in boundary:
        tensor = leaves[places[0]] if places[-1] < len(leaves) else None
        if not isinstance(tensor, Tensor) or (tuple(tensor.shape), tensor.dtype) != (of.shape, of.dtype):
            what = f"{tensor.dtype} {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise RuntimeError(f"a layer got {what}, but in the dry run it got {of.dtype} {of.shape}")
        found.append(tensor)
    return found
