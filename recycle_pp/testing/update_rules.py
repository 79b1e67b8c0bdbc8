"""Checks the promises of an update rule, without a job.

    check("my_package:build")            # AssertionError names the broken promise

Deaths, moving layers and sharded state change no bit if the result of an optimizer step depends only on the unit's
state, its gradient, the learning rate, the decay and the number of the step.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from recycle_pp.config.settings import Settings
from recycle_pp.model.custom_rules import custom_rules
from recycle_pp.numerics import torch_operations
from recycle_pp.numerics.gradients import Reduced
from recycle_pp.numerics.layer_tensors import LayerTensors
from recycle_pp.numerics.optimizer import StageOptimizer
from recycle_pp.numerics.update_rules.rule import Parameter

SHAPES = {
    "embedding.weight": (96, 32), "layers.0.weight": (64, 48), "layers.0.bias": (64,), "layers.0.experts": (4, 24, 16),
    "layers.1.weight": (48, 64), "layers.1.norm": (48,), "head.weight": (96, 32),
}  # fmt: skip
LAYERS = [-1, 0, 0, 0, 1, 1, 2]
CPU = torch.device("cpu")
STEPS = 4
State = dict[str, torch.Tensor]


def check(build: str, settings: Settings | None = None) -> None:
    """Raises AssertionError, with one sentence, if the update rule breaks a promise. Raises any other error that a job
    would raise.

    build: value of the setting `optimizer.build`"""
    settings = (settings or Settings()).with_values({"optimizer.name": "custom", "optimizer.build": build})
    once, begun = _trained(settings), _state(_optimizer(settings))
    for name, tensor in once.items():
        assert torch.isfinite(tensor).all(), f"{name} is not finite after {STEPS} steps"
        assert not name.startswith("model ") or not torch.equal(tensor, begun[name]), f"{name} never changes"
    _compare(once, _trained(settings), "repeated steps give different bits: a step must be deterministic")
    _compare(once, _trained(settings, alone=True), "a unit updated alone gets different bits than with its neighbours")
    _compare(
        once,
        _trained(settings, moved=True),
        "a worker that takes over the state gets different bits: a rule must keep nothing but its state vectors",
    )
    with ThreadPoolExecutor(1) as thread:
        _compare(once, thread.submit(_trained, settings).result(), "another thread gets different bits")


def _compare(one: State, other: State, broken: str) -> None:
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), f"{broken} (first in {name})"


def _trained(settings: Settings, alone: bool = False, moved: bool = False) -> State:
    """The state after some steps.

    alone: whether the optimizer holds and updates units separately, not the whole stage at once
    moved: whether a new optimizer takes over the state before each step"""
    optimizer = _optimizer(settings, whole=not alone)
    for step in range(STEPS):
        if moved:
            before, optimizer = optimizer, _optimizer(settings)
            optimizer.load(before.state())
        reduced = _gradient(optimizer.tensors, step)
        grads = reduced.flat.clone()
        optimizer.step(
            replace(reduced, units=tuple(optimizer.held)) if alone else reduced, step, 1.0 if step % 2 else 0.5
        )
        assert torch.equal(reduced.flat, grads), "a step changes its gradient, which is still needed"
    return _state(optimizer)


def _optimizer(settings: Settings, whole: bool = True) -> StageOptimizer:
    """An optimizer whose first weights are always the same. Its units have at most 512 elements."""
    choose, depth = custom_rules(settings.optimizer), max(LAYERS)
    assert choose is not None
    size = lambda name, shape, layer: choose(Parameter(name, shape, 0 <= layer < depth)).unit_size and 512  # noqa: E731
    tensors = LayerTensors(settings, SHAPES, LAYERS, torch_operations, CPU, depth=depth, cut=size, choose=choose)
    for seed, view in enumerate(tensors.layout.views(tensors.flat)):
        view.normal_(generator=torch.Generator().manual_seed(seed))
    optimizer = StageOptimizer(settings, tensors, whole)
    for unit in () if whole else range(len(tensors.layout.units)):
        optimizer.begin(unit)
    return optimizer


def _gradient(tensors: LayerTensors, step: int) -> Reduced:
    flat = tensors.layout.vector(CPU)
    for view in tensors.layout.views(flat):
        view.normal_(generator=torch.Generator().manual_seed(1000 + step))
    nothing = torch.empty(0)
    return Reduced(flat, nothing, nothing, [], True)


def _state(optimizer: StageOptimizer) -> State:
    units = enumerate(optimizer.tensors.layout.unit_names)
    return {
        f"{vector} {name}": tensor.clone()
        for unit, name in units
        for vector, tensor in zip(optimizer.held[unit].names, optimizer.vectors(unit), strict=True)
    }
