"""Parameters that several stages hold, as an embedding that is the head as well: their gradient is the sum over them.

    ties = Ties(gradients, layout, stage=3, shared={"wte.weight": [0, 3]}, ops=ops)
    parcel = ties.parcel(reduced, to=0)             # what stage 0 needs of this one
    reduced = ties.united(reduced, {0: parcel})     # the sum over all stages that hold them; any number of times

Each stage sums its own uses over its peers first, as it sums everything; then the sums (int64, or float32) go to the
other stages, which add them in the order of the stages. So all of them hold the same bits and apply the same update.
The norm counts such a gradient once, at the first of its stages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .gradients import Gradients, Reduced
from .layout import Layout
from .operations import Operations


class Ties:
    """stages: the other stages that this one has parameters in common with."""

    def __init__(
        self, gradients: Gradients, layout: Layout, stage: int, shared: Mapping[str, Sequence[int]], ops: Operations
    ) -> None:
        self._gradients, self._layout, self._stage, self._ops = gradients, layout, stage, ops
        self._shared = {name: sorted(stages) for name, stages in sorted(shared.items())}
        self._slot = {name: k for k, name in enumerate(layout.names)}
        # Each stage's own sum fits by half a bit and no more.
        self._wide = torch.int64 if gradients.dtype == torch.int32 else gradients.dtype
        self.stages = sorted({other for of in shared.values() for other in of} - {stage})

    def parcel(self, reduced: Reduced, to: int) -> Tensor:
        """This stage's own sums of what it has in common with that one, and whether they are finite; one vector."""
        own = self._own(reduced)
        finite = torch.tensor([reduced.finite], dtype=own[0].dtype, device=own[0].device)
        return torch.cat(
            [finite, *(x.flatten() for n, x in zip(self._shared, own, strict=True) if to in self._shared[n])]
        )

    def room(self, to: int) -> Tensor:
        """Uninitialised memory for the parcel from that stage."""
        sizes = [math.prod(self._layout.shapes[self._slot[name]]) for name, of in self._shared.items() if to in of]
        return torch.empty(1 + sum(sizes), dtype=self._gradients.dtype, device=self._gradients.device)

    def united(self, reduced: Reduced, parcels: Mapping[int, Tensor]) -> Reduced:
        """parcels: of every stage in `stages`."""
        finite = reduced.finite and all(bool(parcel[0]) for parcel in parcels.values())
        rest = {stage: parcel[1:] for stage, parcel in parcels.items()}
        views = self._layout.views(reduced.flat)
        for name, own in zip(self._shared, self._own(reduced), strict=True):
            total = torch.zeros_like(own, dtype=self._wide)
            for stage in self._shared[name]:
                if stage == self._stage:
                    total += own
                else:
                    total += rest[stage][: own.numel()].view(own.shape)
                    rest[stage] = rest[stage][own.numel() :]
            self._gradients.restore(self._slot[name], total, views[self._slot[name]])
        squares = self._ops.squared_norms(reduced.flat, self._gradients.places).tolist()
        finite = finite and math.isfinite(sum(squares))
        others = {self._slot[name] for name, stages in self._shared.items() if stages[0] != self._stage}
        squares = [0.0 if block.tensor in others else x for block, x in zip(self._layout.blocks, squares, strict=True)]
        return replace(reduced, squares=squares, finite=finite)

    def _own(self, reduced: Reduced) -> list[Tensor]:
        assert reduced.shared is not None
        sizes = [math.prod(self._layout.shapes[self._slot[name]]) for name in self._shared]
        pieces = zip(self._shared, reduced.shared.split(sizes), strict=True)
        return [piece.view(self._layout.shapes[self._slot[name]]) for name, piece in pieces]
