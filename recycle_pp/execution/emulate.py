"""Emulated compute: every op sleeps for its given time while real messages of the real size travel.

    stage = EmulatedStage(settings, 1, device); optimizer = EmulatedOptimizer(settings, stage)

Shows what a schedule or a recovery really costs with dozens of workers on two cores. Losses and weights mean nothing.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from recycle_pp.execution.gradients import Reduced
from recycle_pp.execution.optimizer import StageOptimizer
from recycle_pp.model.stage import Stage


class EmulatedStage(Stage):
    """A Stage that has parameters and gradients of the right size, and computes nothing."""

    def forward(self, step: int, g: int, source: Tensor, targets: Tensor | None = None) -> Tensor:
        time.sleep(self.settings.emulate.F)
        return torch.zeros(()) if self.last else self._boundary_tensor()

    def backward_input(self, g: int, grad: Tensor | None = None) -> Tensor | None:
        time.sleep(self.settings.emulate.I)
        return None if self.first else self._boundary_tensor()

    def backward_weight(self, g: int) -> None:
        time.sleep(self.settings.emulate.W)
        self.gradients.close(g, 0.0 if self.last else None)

    def backward(self, g: int, grad: Tensor | None = None) -> Tensor | None:
        time.sleep(self.settings.emulate.I + self.settings.emulate.W)
        self.gradients.close(g, 0.0 if self.last else None)
        return None if self.first else self._boundary_tensor()

    def evaluate(self, source: Tensor, targets: Tensor | None = None) -> Tensor:
        return self.forward(0, 0, source, targets)

    def _boundary_tensor(self) -> Tensor:
        shape, dtype = self.boundary
        return torch.empty(shape, dtype=dtype, device=self.device)


class EmulatedOptimizer(StageOptimizer):
    def step(self, reduced: Reduced, step: int, scale: float = 1.0) -> None:
        time.sleep(self._settings_emulate.O)

    def __init__(self, settings, stage: Stage) -> None:  # type: ignore[no-untyped-def]
        super().__init__(settings, stage)
        self._settings_emulate = settings.emulate
