"""The weights and gradient sums of some layers of a stage. An optimizer updates the weights (`numerics.optimizer`).

    tensors = LayerTensors(settings, shapes, layers, ops, device, depth=8)     # zeros
    tensors.layout, tensors.flat, tensors.working, tensors.gradients, tensors.rule_of(unit)
    tensors.merge(shapes, layers, arriving=[other])                    # changes the layers in place

`model.stage.Stage` is a subclass that also computes with its layers. Layers that arrive at a stage stay in a separate
`LayerTensors` until the stage merges them. Each layer has its own tensors, so no memory is copied when layers move.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cache

import torch

from recycle_pp.config.settings import Settings

from . import fixed_point
from .gradients import Gradients
from .layout import Cut, Layout
from .operations import Operations
from .outer_state import outer_vectors
from .update_rules.choice import Choice, choice
from .update_rules.rule import Parameter, UpdateRule


class LayerTensors:
    """
    Attributes:
        layout: the layout of all vectors; replaced when layers move.
        flat: the masters, float32. With bf16 and sharded state, it becomes `working` when the setup is complete.
        working: the weights that the computation uses: `flat` itself, or with bf16 its rounded copy.
        gradients: the sums over the micro-batches that ran here.
        ops: the kernels, see `numerics.operations`.
        choose: the update rule of each parameter.
    """

    def __init__(
        self,
        settings: Settings,
        shapes: Mapping[str, Sequence[int]],
        layers: Sequence[int],
        ops: Operations,
        device: torch.device,
        *,
        depth: int,
        parts: Sequence[int] | None = None,
        shared: Collection[str] = (),
        cut: Cut | None = None,
        choose: Choice | None = None,
    ) -> None:
        """shapes, layers: shape and layer of each parameter, see `Layout`
        depth: number of layers that are divided among the stages, see `StageModule`
        parts, shared: see `Gradients`
        cut: maximum size of units; None: that of the update rules
        choose: the update rule of each parameter; None: that of the settings"""
        self.settings, self.ops, self.device = settings, ops, device
        self.microbatches = settings.parallel.pipelines * settings.parallel.microbatches  # G
        self.depth, self.choose = depth, cache(choose or choice(settings.optimizer))
        self.layout = Layout(shapes, cut or self._cut, layers)
        self.flat = self.layout.zeros(device)
        rounds = settings.numerics.precision == "bf16"
        self.working = self.layout.zeros(device, torch.bfloat16) if rounds else self.flat
        self.gradients = Gradients(
            self.layout, self.microbatches, device,
            reproducible=settings.numerics.reproducible, ops=ops, parts=parts, shared=shared, form=form_of(settings),
        )  # fmt: skip

    @property
    def names(self) -> list[str]:
        """Full-model names of the parameters, in canonical order."""
        return self.layout.names

    def rule(self, tensor: int) -> UpdateRule:
        """The update rule of a tensor."""
        layout = self.layout
        return self._rule(layout.names[tensor], layout.shapes[tensor], layout.layer_of[tensor])

    def rule_of(self, unit: int) -> UpdateRule:
        """The update rule of a unit."""
        return self.rule(self.layout.units[unit].tensor)

    def names_of(self, tensor: int) -> tuple[str, ...]:
        """Names of the vectors in a tensor's state: "model" (the master), those of its update rule and of an island."""
        return ("model", *self.rule(tensor).vectors, *outer_vectors(self.settings))

    def _rule(self, name: str, shape: Sequence[int], layer: int) -> UpdateRule:
        return self.choose(Parameter(name, tuple(shape), 0 <= layer < self.depth))

    def _cut(self, name: str, shape: Sequence[int], layer: int) -> int | None:
        return self._rule(name, shape, layer).unit_size

    def merge(
        self,
        shapes: Mapping[str, Sequence[int]],
        layers: Sequence[int],
        arriving: Sequence[LayerTensors] = (),
        parts: Sequence[int] | None = None,
        shared: Collection[str] = (),
    ) -> None:
        """Changes the layers in place, and drops the gradient sums.

        Layers in `arriving` bring their memory and their exponents. The other layers keep theirs.

        shapes, layers, parts, shared: as for a new object with the new layers"""
        sources = [*arriving, self]
        layout = Layout(shapes, self.layout.cut, layers)
        self.gradients.relayout(layout, [of.gradients for of in arriving], parts, shared)
        same = self.flat is self.working
        self.working = layout.gathered([(of.layout, of.working) for of in sources])
        self.flat = self.working if same else layout.gathered([(of.layout, of.flat) for of in sources])
        self.layout = layout

    def changed(self) -> None:
        """Call this after an in-place change of the weights. Does nothing here; `Stage` overrides it."""


def form_of(settings: Settings) -> fixed_point.Format:
    """The format of the sums if they are fixed-point."""
    return fixed_point.INT32 if settings.numerics.sums == "int32" else fixed_point.INT64
