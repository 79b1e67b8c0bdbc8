"""The state of units that one worker holds.

held = Held(range(3, 4), ("model", "exp_avg", "exp_avg_sq"), (master, mean, square))
held.seal = held.checksum(); held.inspect()          # detects memory that changed without an update
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from recycle_pp.comm.tensor_bytes import aligned_bytes

from .layout import Layout

State = tuple[Tensor, ...]  # masters (float32 weights), then the vectors of the update rule; flat, equally long


@dataclass
class Held:
    """The state of neighbouring units in one piece of memory. One update rule updates all of them.

    names    names of the tensors in `state`, as in a checkpoint
    before   the state before a speculation; allocated by the first speculation, then reused
    seal     (1,) int64, checksum of `state` after the latest update; None if the job does not use seals
    changed  (1,) bool, whether `inspect` has found memory that changed without an update; None before the first call
    """

    units: range
    names: tuple[str, ...]
    state: State
    before: State | None = None
    seal: Tensor | None = None
    changed: Tensor | None = None

    def checksum(self, before: bool = False) -> Tensor:
        """(1,) int64 checksum of the state, a weighted sum of its 64-bit words. Any single bit flip changes it.

        before: use the state before a speculation"""
        state = self.before if before else self.state
        assert state is not None
        total = torch.zeros(1, dtype=torch.int64, device=state[0].device)
        for number, vector in enumerate(state):
            total += (2 * number + 1) * vector.view(torch.int64).sum()  # an odd factor is invertible modulo 2**64
        return total

    def inspect(self) -> None:
        """Sets `changed` if the checksum differs from the seal. The state has then changed without an update."""
        if self.seal is not None:
            now = self.checksum() != self.seal
            self.changed = now if self.changed is None else self.changed | now


def renumbered(held: Mapping[int, Held], before: Layout, after: Layout) -> dict[int, Held]:
    """The units of `held` that are in both layouts, by their numbers in `after`. Changes the attribute `units` of each
    `Held`."""
    found: dict[int, Held] = {}
    for layer in before.layers.keys() & after.layers.keys():
        shift = after.layers[layer].start - before.layers[layer].start
        mine = {unit: held[unit] for unit in before.layers[layer] if unit in held}
        for of in {id(of): of for of in mine.values()}.values():  # each object once; units may share one
            of.units = range(of.units.start + shift, of.units.stop + shift)
        found |= {unit + shift: of for unit, of in mine.items()}
    return found


def parts(state: State, place: slice) -> State:
    """Views of the elements `place` of each vector."""
    return tuple(vector[place] for vector in state)


def empty(size: int, device: torch.device, width: int = 4) -> Tensor:
    """An uninitialised vector (size,), aligned to 256 bytes. width: bytes of an element (float32: 4, bfloat16: 2)."""
    return aligned_bytes(width * size, device).view(torch.float32 if width == 4 else torch.bfloat16)
