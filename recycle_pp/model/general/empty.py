"""A model without memory: its structure, names, ties and buffers, and parameters that consist of shapes only.

model = empty(source)                       # parameters on `meta`; a 70B model takes a second
canonical = unshare(model)                  # makes a separate module for every use; name -> canonical name
make_fake(model, mode)                      # parameters that report the CPU as device, for a run without arithmetic
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .source import Source


def empty(source: Source, traced: bool = False) -> nn.Module:
    """The whole model in training mode, with real buffers. Parameters are moved to `meta` as they are registered.

    traced: see `Source.build`."""
    with _parameters_without_memory():
        return source.build(traced=traced).train()


def unshare(model: nn.Module) -> dict[str, str]:
    """Replaces every repeated occurrence of a module in `model` with a copy, so that every use of a shared parameter
    can have its own autograd leaf.

    Returns every name of a parameter or buffer -> its canonical name, the first name of the same tensor."""
    first: dict[int, str] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    canonical = {name: first.setdefault(id(tensor), name) for name, tensor in named}
    seen: set[int] = set()

    def walk(module: nn.Module) -> None:
        for name, child in list(module._modules.items()):
            if child is None:
                continue
            if id(child) in seen:
                child = module._modules[name] = copy.deepcopy(child)
            seen.add(id(child))
            walk(child)

    walk(model)
    return canonical


def make_fake(model: nn.Module, mode: Any) -> None:
    """Replaces parameters and buffers with fake tensors of `mode`. Each name of a tied parameter gets its own tensor,
    so that the uses of the parameter can be distinguished."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            module._parameters[name] = None if parameter is None else _parameter(parameter)
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else mode.from_tensor(buffer)


def _parameter(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype), parameter.requires_grad)


@contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """Moves parameters to `meta` when they are registered. Buffers stay real, and ties are kept."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta":
            parameter = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
