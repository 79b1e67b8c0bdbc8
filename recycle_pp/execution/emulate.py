"""Emulates compute. Every op sleeps for its configured time. Messages are real and have their real size.

The configured times apply to a stage with the mean number of layers. The times of other stages are proportional to
their numbers of layers.

    stage = EmulatedStage(settings, 1, device); optimizer = EmulatedOptimizer(settings, stage)

Emulation shows the cost of a schedule or a recovery with dozens of workers on two cores. Losses and weights are
meaningless.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from recycle_pp.config.settings import Settings
from recycle_pp.model.stage import Stage
from recycle_pp.model.stage_module import Batch, Boundary
from recycle_pp.numerics.gradients import Reduced
from recycle_pp.numerics.layer_tensors import LayerTensors
from recycle_pp.numerics.optimizer import StageOptimizer

HOST_AHEAD = 0.001  # seconds of host work (Python and a wake-up) between two ops


class EmulatedDevice:
    """A device with a queue. An op launched up to `HOST_AHEAD` seconds after the end of the previous op starts at that
    end, as on a GPU whose host launches ahead. The host's work between two ops thus costs no time."""

    def __init__(self) -> None:
        self._free = 0.0

    def run(self, seconds: float) -> None:
        now = time.monotonic()
        begin = self._free if now - self._free < HOST_AHEAD else now
        self._free = begin + seconds
        time.sleep(max(0.0, self._free - now))


class EmulatedStage(Stage):
    """A stage that computes nothing. Its parameters and gradients have their real size."""

    def __init__(
        self,
        settings: Settings,
        stage: int,
        device: torch.device,
        run_dir: str | Path | None = None,
        filled: bool = True,
    ) -> None:
        super().__init__(settings, stage, device, run_dir, filled)
        self._device = EmulatedDevice()

    def run(self, seconds: float) -> None:
        """Sleeps for the time of an op of this stage. seconds: its time in a stage with the mean number of layers."""
        depth = self.module.depth
        mine = sum(0 <= layer < depth for layer in self.layout.layers)
        self._device.run(seconds * mine * self.settings.parallel.stages / depth)

    def forward(self, step: int, g: int, batch: Batch | None = None, boundary: Sequence[Tensor] = ()) -> list[Tensor]:
        self.run(self.settings.emulate.F)
        return [torch.zeros(())] if self.last else self._made(self.module.gives)

    def backward_input(self, g: int, grads: Sequence[Tensor] = ()) -> list[Tensor]:
        self.run(self.settings.emulate.I)
        return self._gradients()

    def backward_weight(self, g: int) -> None:
        self.run(self.settings.emulate.W)
        self.gradients.close(g, 0.0 if self.last else None)

    def backward(self, g: int, grads: Sequence[Tensor] = ()) -> list[Tensor]:
        self.run(self.settings.emulate.I + self.settings.emulate.W)
        self.gradients.close(g, 0.0 if self.last else None)
        return self._gradients()

    def evaluate(self, batch: Batch | None = None, boundary: Sequence[Tensor] = ()) -> list[Tensor]:
        return self.forward(0, 0)

    def _gradients(self) -> list[Tensor]:
        return self._made([tensor for tensor in self.module.takes if tensor.differentiable])

    def _made(self, boundary: Sequence[Boundary]) -> list[Tensor]:
        return [tensor.empty(self.device) for tensor in boundary]


class StillOptimizer(StageOptimizer):
    """An optimizer whose updates take no time and change neither the state nor the exponents."""

    def _update(self, reduced: Reduced, step: int, scale: float, ahead: bool) -> None:
        for held in self.held.values():
            held.before = held.state  # the state that `undo` restores

    def _learn(self, reduced: Reduced) -> None:
        pass


class EmulatedOptimizer(StillOptimizer):
    """An optimizer that sleeps instead of updating."""

    def __init__(self, settings: Settings, stage: EmulatedStage, whole: bool = True) -> None:
        super().__init__(settings, stage, whole)
        self._stage = stage

    def beside(self, tensors: LayerTensors) -> StageOptimizer:
        return StillOptimizer(self._all_settings, tensors, self._whole)

    def _update(self, reduced: Reduced, step: int, scale: float, ahead: bool) -> None:
        super()._update(reduced, step, scale, ahead)
        self._stage.run(self.tensors.settings.emulate.O)
