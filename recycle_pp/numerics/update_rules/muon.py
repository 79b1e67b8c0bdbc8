"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon): orthogonalised momentum, for matrices.

A step needs the whole matrix, so a unit is a whole tensor. On a GPU the formula is that of `torch.optim.Muon`, with its
bfloat16 products. On a CPU the products are float32, because bfloat16 takes 50 times as long on many CPUs.

With optimizer.moments=bf16 a step computes in float32, and rounds the new momentum to nearest even when it stores it.
The direction follows from the momentum before this rounding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from recycle_pp.config.settings import Optimizer

from .rule import UnitRule, width_of

if TYPE_CHECKING:
    from torch import Tensor

A, B, C = 3.4445, -4.7750, 2.0315  # coefficients of the quintic iteration
EPS = 1e-7


class Muon(UnitRule):
    vectors = ("momentum_buffer",)
    scratch = 16  # four float32 matrices: the direction, the next one, and two products

    def __init__(self, settings: Optimizer) -> None:
        self._settings = settings.muon
        self.width = width_of(settings)

    def step(
        self, weight: Tensor, grad: Tensor, state: Mapping[str, Tensor], *, lr: float, decay: float, step: int
    ) -> None:
        direction = orthogonalised(self._ahead(state["momentum_buffer"], grad), self._settings.iterations)
        weight.mul_(1 - lr * decay)
        weight.add_(direction, alpha=-lr * self._factor(*weight.shape))

    def _ahead(self, momentum: Tensor, grad: Tensor) -> Tensor:
        """Updates the momentum. Returns the gradient with Nesterov's look-ahead."""
        decay = self._settings.momentum
        mean = momentum.float()  # the same tensor, unless the momentum is bfloat16
        mean.lerp_(grad, 1 - decay)
        momentum.copy_(mean)
        return grad.lerp(mean, decay)

    def _factor(self, rows: int, columns: int) -> float:
        if self._settings.scale == "adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(max(1, rows / columns))


def orthogonalised(matrix: Tensor, iterations: int) -> Tensor:
    """Approximates U V^T for the matrix U S V^T by Newton-Schulz iterations. May overwrite the matrix.

    The singular values of the result are about 0.7 to 1.2.
    """
    tall = matrix.shape[0] > matrix.shape[1]
    x = rounded(matrix)
    x = x.T if tall else x
    x = x.div_(x.norm().clamp(min=EPS))
    for _ in range(iterations):
        gram = x @ x.T
        x = x.addmm(gram.addmm(gram, gram, beta=B, alpha=C), x, beta=A)
    return x.T if tall else x


def rounded(matrix: Tensor) -> Tensor:
    """The matrix in the dtype of the iterations."""
    return matrix.bfloat16() if matrix.is_cuda else matrix
