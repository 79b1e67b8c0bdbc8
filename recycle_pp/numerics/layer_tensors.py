"""The weights and the gradient sums of some layers of a stage. An optimizer updates them (`numerics.optimizer`).

    tensors = LayerTensors(settings, shapes, layers, ops, device)      # zeros
    tensors.layout, tensors.flat, tensors.working, tensors.gradients
    tensors.merge(shapes, layers, arriving=[other])                    # changes the layers in place

`model.stage.Stage` is such an object, with the computation of its layers. Layers that arrive at a stage are another one
until the stage takes them. Each layer has tensors of its own, so the memory of a layer that stays or moves is not
copied.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial

import torch

from recycle_pp.config.settings import Settings

from . import fixed_point
from .gradients import Gradients
from .hyperparameters import unit_size
from .layout import Cut, Layout
from .operations import Operations


class LayerTensors:
    """
    Attributes:
        layout: the layout of all vectors; replaced when layers move.
        flat: the masters, float32. With bf16 and sharded state, it becomes `working` when the setup is complete.
        working: the weights that the computation uses: `flat` itself, or with bf16 its rounded copy.
        gradients: the sums over the micro-batches that ran here.
        ops: the kernels, see `numerics.operations`.
    """

    def __init__(
        self,
        settings: Settings,
        shapes: Mapping[str, Sequence[int]],
        layers: Sequence[int],
        ops: Operations,
        device: torch.device,
        *,
        parts: Sequence[int] | None = None,
        shared: Collection[str] = (),
        cut: Cut | None = None,
    ) -> None:
        """shapes, layers: of each parameter, see `Layout`
        parts, shared: see `Gradients`
        cut: maximum size of units; None: as the optimizer sets it"""
        self.settings, self.ops, self.device = settings, ops, device
        self.microbatches = settings.parallel.pipelines * settings.parallel.microbatches  # G
        self.layout = Layout(shapes, cut or partial(unit_size, settings.optimizer), layers)
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

    def merge(
        self,
        shapes: Mapping[str, Sequence[int]],
        layers: Sequence[int],
        arriving: Sequence[LayerTensors] = (),
        parts: Sequence[int] | None = None,
    ) -> None:
        """Changes the layers in place. Layers that these tensors lack come from `arriving`, with their memory and their
        exponents. The gradient sums must be empty.

        shapes, layers, parts: as for a new object with the new layers"""
        sources = [self, *arriving]
        layout = Layout(shapes, self.layout.cut, layers)
        self.gradients.relayout(layout, [of.gradients for of in arriving], parts)
        same = self.flat is self.working
        self.working = layout.gathered([(of.layout, of.working) for of in sources])
        self.flat = self.working if same else layout.gathered([(of.layout, of.flat) for of in sources])
        self.layout = layout

    def changed(self) -> None:
        """To be called after an in-place change of the weights."""


def form_of(settings: Settings) -> fixed_point.Format:
    """The fixed-point format of the sums, if they are fixed-point."""
    return fixed_point.INT32 if settings.numerics.sums == "int32" else fixed_point.INT64
