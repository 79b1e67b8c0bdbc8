"""The state of units that one worker holds.

held = Held(range(3, 4), (master, mean, square))
held.seal = held.checksum(); held.inspect()          # detects a change of memory without an update
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from recycle_pp.comm.tensor_bytes import aligned_bytes

from .layout import Layout
from .operations import State

VECTORS = ("model", "exp_avg", "exp_avg_sq")  # names of a unit's vectors in a checkpoint


@dataclass
class Held:
    """The state of neighbouring units in one piece of memory.

    state    masters (float32 weights), mean gradients, mean squared gradients; flat float32
    before   the state before a speculation; allocated by the first speculation, then reused
    seal     (1,) int64, checksum of `state` after the newest update; None if the job does not use seals
    changed  (1,) bool, whether an inspection has found damage (see `inspect`); None before the first inspection
    """

    units: range
    state: State
    before: State | None = None
    seal: Tensor | None = None
    changed: Tensor | None = None

    def checksum(self, before: bool = False) -> Tensor:
        """(1,) int64 checksum of the state: the sum of its 64-bit words, modulo 2**64. Any bit flip changes it.

        before: use the state before a speculation"""
        state = self.before if before else self.state
        assert state is not None
        master, mean, square = (vector.view(torch.int64).sum(0, keepdim=True) for vector in state)
        return master + 3 * mean + 5 * square  # odd factors lose no bit

    def inspect(self) -> None:
        """Sets `changed` if the checksum differs from the seal: memory has changed without an update."""
        if self.seal is not None:
            now = self.checksum() != self.seal
            self.changed = now if self.changed is None else self.changed | now


def renumbered(held: Mapping[int, Held], before: Layout, after: Layout) -> dict[int, Held]:
    """The units in `held` that `after` has, by their numbers there. Changes the numbers in each `Held`."""
    found: dict[int, Held] = {}
    for layer in before.layers.keys() & after.layers.keys():
        shift = after.layers[layer].start - before.layers[layer].start
        mine = {unit: held[unit] for unit in before.layers[layer] if unit in held}
        for of in {id(of): of for of in mine.values()}.values():  # several units may share it
            of.units = range(of.units.start + shift, of.units.stop + shift)
        found |= {unit + shift: of for unit, of in mine.items()}
    return found


def parts(state: State, place: slice) -> State:
    """Views of the elements `place` of each vector."""
    master, mean, square = state
    return master[place], mean[place], square[place]


def empty(size: int, device: torch.device) -> Tensor:
    """Uninitialised float32 (size,), aligned to 256 bytes."""
    return aligned_bytes(4 * size, device).view(torch.float32)
