"""The interfaces of an update rule: `UpdateRule`, and `UnitRule`, which is simpler because a step updates one unit.

class Sign(UnitRule):
    vectors = ("momentum",)

    def step(self, weight, grad, state, *, lr, decay, step):
        state["momentum"].lerp_(grad, 0.1)
        weight.mul_(1 - lr * decay).sub_(state["momentum"].sign(), alpha=lr)

Every worker that holds a unit computes its update independently, so a step must be deterministic and depend only on its
arguments.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from recycle_pp.config.settings import Optimizer

    from ..held import State
    from ..layout import Layout
    from ..operations import Operations


class Parameter(NamedTuple):
    """
    name    full-model name
    inside  whether it belongs to one of the layers that are divided among the stages; False for the embedding, the
            head, the last norm and tensors that several layers share
    """

    name: str
    shape: tuple[int, ...]
    inside: bool


class Launch(Protocol):
    """Updates neighbouring units in one piece of memory."""

    def __call__(self, state: State, grad: Tensor, *, lr: float, step: int, scale: float, undo: State | None) -> None:
        """Applies step number `step` (from 0), with the gradient times `scale`. Does not change `grad`.

        state  the units' masters (float32 weights), then their vectors, each flat and with all elements of the units
        grad   flat float32
        undo   receives a copy of the state before the step
        """
        ...


class UpdateRule(ABC):
    """
    vectors    names of the state vectors besides the masters. Each has one element for each element of the parameter.
               In a checkpoint their names are VECTOR.NAME
    width      bytes of an element of these vectors: 4 for float32, 2 for bfloat16
    unit_size  maximum number of elements of a unit, unless a row has more (see `layout`); None: a unit is a whole
               tensor. It affects the bits of the result with int64 sums, because the elements of a unit share an
               exponent
    scratch    temporary bytes that a step needs for each element of the largest unit; the planner uses this number
    """

    vectors: tuple[str, ...]
    width = 4
    unit_size: int | None = None
    scratch = 0

    @abstractmethod
    def launch(self, units: Layout, ops: Operations, device: torch.device, decay: float) -> Launch:
        """Returns a function that updates neighbouring units.

        units  a layout with only these units
        decay  weight decay of matrices
        """

    @property
    def bytes(self) -> int:
        """Bytes of state for each element of a parameter, besides its master."""
        return self.width * len(self.vectors)


def width_of(settings: Optimizer) -> int:
    """The `width` of a rule with optimizer.moments=bf16 or fp32."""
    return 2 if settings.moments == "bf16" else 4


class UnitRule(UpdateRule):
    """Base class of rules whose `step` updates one unit."""

    @abstractmethod
    def step(
        self, weight: Tensor, grad: Tensor, state: Mapping[str, Tensor], *, lr: float, decay: float, step: int
    ) -> None:
        """Updates the weights and the state of one unit in place.

        weight  float32 master. A whole tensor has its own shape, and some rows of a tensor form a matrix
        grad    float32, clipped, in the shape of `weight`. Read only
        state   vector -> its elements, in the shape of `weight`; zeros before the first step
        lr      learning rate of this step, with the factor of the parameter's group
        decay   weight decay, with the factor of the parameter's group; 0 for vectors
        step    number of the step, from 0
        """

    def launch(self, units: Layout, ops: Operations, device: torch.device, decay: float) -> Launch:
        cut = units.views if self.unit_size is None else units.units_of
        decays = [decay * (len(units.shapes[unit.tensor]) >= 2) for unit in units.units]

        def launch(state: State, grad: Tensor, *, lr: float, step: int, scale: float, undo: State | None) -> None:
            for kept, live in zip(undo or (), state, strict=False):
                kept.copy_(live)
            grads, (weights, *vectors) = cut(grad), map(cut, state)
            for unit, (weight, g, of) in enumerate(zip(weights, grads, decays, strict=True)):
                own = dict(zip(self.vectors, (vector[unit] for vector in vectors), strict=True))
                self.step(weight, g if scale == 1.0 else g * scale, own, lr=lr, decay=of, step=step)

        return launch
