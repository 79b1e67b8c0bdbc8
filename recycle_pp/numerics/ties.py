"""Tied units: units that several stages hold, such as an embedding that is also the head. Their gradient is the sum
over these stages.

    ties = Ties(gradients, stage=3, shared={"wte.weight": [0, 3]})
    parcel = ties.parcel(reduced, mine, units)           # this stage's sums, for another stage
    reduced = ties.summed(reduced, mine, parcels, exponents)     # the sums over all stages; may be called again

A stage first sums its own gradients over its workers. Workers of the stages then exchange these sums (int64, int32 or
float32) and add them in the order of the stages, so the bits are the same in all stages. Each stage cuts the tensor
into the same units. The gradient's norm counts a tied unit once, in its first stage. `state.ties` sends the messages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .gradients import Gradients, Reduced


class Ties:
    """The tied units of a stage.

    stage: number of this stage
    """

    def __init__(self, gradients: Gradients, stage: int, shared: Mapping[str, Sequence[int]]) -> None:
        """shared: name of a tied tensor -> the stages that hold it."""
        self.gradients, self.stage, self._shared = gradients, stage, shared

    @property
    def units(self) -> list[int]:
        """The numbers of the tied units, in an order that is the same in all stages. They change if layers move."""
        return self.gradients.tied

    def stages(self, unit: int) -> list[int]:
        """All stages that hold the unit, ascending."""
        layout = self.gradients.layout
        return sorted(self._shared[layout.names[layout.units[unit].tensor]])

    def own(self, reduced: Reduced, mine: Sequence[int]) -> dict[int, Tensor]:
        """This stage's own sums, by unit. mine: tied units that this worker sums, in order."""
        assert reduced.shared is not None
        sizes = [self._size(unit) for unit in mine]
        return dict(zip(mine, reduced.shared.split(sizes), strict=True))

    def parcel(self, reduced: Reduced, mine: Sequence[int], units: Sequence[int]) -> Tensor:
        """One vector to send: 1 if this stage's gradient is finite (else 0), then this stage's sums of these units."""
        own = self.own(reduced, mine)
        finite = torch.tensor([reduced.finite], dtype=self.gradients.dtype, device=self.gradients.device)
        return torch.cat([finite, *(own[unit] for unit in units)])

    def room(self, units: Sequence[int]) -> Tensor:
        """Uninitialised memory for the parcel of another stage with these units."""
        size = 1 + sum(self._size(unit) for unit in units)
        return torch.empty(size, dtype=self.gradients.dtype, device=self.gradients.device)

    def summed(
        self,
        reduced: Reduced,
        mine: Sequence[int],
        parcels: Sequence[tuple[int, Sequence[int], Tensor]],
        exponents: Tensor,
    ) -> Reduced:
        """`reduced`, with the gradients of the units `mine` summed over all stages, and with the norms of these sums.

        Includes the norms that another stage counts (see `counted_once`).

        parcels: (stage, units, parcel) from every other stage that holds one of the units
        exponents: those of this step's sums; after an early update `gradients` has those of the next step
        """
        gradients = self.gradients
        # The sums of several stages together may overflow int32: the format leaves at most one bit of room.
        wide = torch.int64 if gradients.dtype == torch.int32 else gradients.dtype
        sums = {(unit, self.stage): own for unit, own in self.own(reduced, mine).items()}
        for stage, units, parcel in parcels:
            parts = parcel[1:].split([self._size(unit) for unit in units])
            sums |= {(unit, stage): part for unit, part in zip(units, parts, strict=True)}
        grads, squares, counts = gradients.grads(reduced), list(reduced.squares), gradients.largest_counts
        largest = None if reduced.largest is None else reduced.largest.clone()
        for unit in mine:
            total = torch.zeros_like(sums[unit, self.stage], dtype=wide)
            for stage in self.stages(unit):
                total += sums[unit, stage]
            gradients.restore(unit, total, grads[unit], exponents)
            if largest is not None and counts[unit]:
                largest.split(counts)[unit].copy_(gradients.largest_of(unit, grads[unit]))
        found = torch.cat([gradients.square(unit, grads[unit]) for unit in mine]).tolist() if mine else []
        for unit, square in zip(mine, found, strict=True):
            squares[unit] = square
        finite = reduced.finite and all(bool(parcel[0]) for *_, parcel in parcels) and math.isfinite(sum(squares))
        return replace(reduced, squares=squares, finite=finite, largest=largest)

    def counted_once(self, reduced: Reduced) -> Reduced:
        """`reduced` without the norms that another stage counts."""
        others = {unit for unit in self.units if self.stages(unit)[0] != self.stage}
        return replace(reduced, squares=[0.0 if k in others else x for k, x in enumerate(reduced.squares)])

    def _size(self, unit: int) -> int:
        span = self.gradients.layout.spans[unit]
        return span.stop - span.start
