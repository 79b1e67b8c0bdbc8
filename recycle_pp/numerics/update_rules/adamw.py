"""AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101).

On a CPU the bits are those of `torch.optim.AdamW(fused=True)`. The update is elementwise, and units begin and end at
multiples of 16 elements, the width of a CPU's vector loop. A unit therefore gets the same bits whether it is updated
alone or with its neighbours, so one launch updates all neighbours.

With optimizer.moments=bf16 a step computes in float32, and rounds the new moments to nearest even when it stores them.
The parameters get the moments before this rounding.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

from recycle_pp.config.settings import Optimizer

from .rule import Launch, UpdateRule, width_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..held import State
    from ..layout import Layout
    from ..operations import AdamWState, Operations


class AdamW(UpdateRule):
    vectors = ("exp_avg", "exp_avg_sq")
    unit_size = 1 << 20

    def __init__(self, settings: Optimizer) -> None:
        self._settings = settings
        self.width = width_of(settings)

    def launch(self, units: Layout, ops: Operations, device: torch.device, decay: float) -> Launch:
        places, settings = ops.places(units, device), replace(self._settings, weight_decay=decay)

        def launch(state: State, grad: Tensor, *, lr: float, step: int, scale: float, undo: State | None) -> None:
            of, before = cast("AdamWState", state), cast("AdamWState | None", undo)
            ops.adamw(of, grad, places, settings, lr=lr, step=step, scale=scale, undo=before)

        return launch
