"""Sums the gradients of tied units over the stages that hold them (`numerics.ties`).

    tied = Ties(links, stage, me, wait, forward)
    tied.units                                       # numbers of this stage's tied units; empty in most models
    reduced = tied.reduce(shares, reduced, exponents)     # after the stage's own reduction, once per generation

Pairs of members from two stages exchange their stages' sums of a unit. If a stage sums all gradients by one all-reduce,
every member has the sum. Otherwise only the first holder has it, and sends the resulting gradient to the other holders.
`Shares.elsewhere` lists the members of the other stages. Both stages derive the same pairs from these lists, and
distribute the pairs over their members.

Workers call `reduce` after their stage's reduction and before they vote, so every vote refers to the sum over all
stages. This is true even after a death, when the stage's own sum may be from an earlier generation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from recycle_pp.comm.links import Links
from recycle_pp.comm.waiting import Pending
from recycle_pp.model.stage import Stage
from recycle_pp.numerics import ties
from recycle_pp.numerics.gradients import Reduced
from recycle_pp.wire.messages.generations import Shares
from recycle_pp.wire.messages.members import Member

from .passing import OWN_SUMS, TIED_GRADIENTS

Wait = Callable[..., None]
Forward = Callable[[int, list[int], Tensor | None, int], list[Pending]]


class Ties:
    """The tied units of this worker's stage, summed over all stages that hold them.

    wait(pending, giver): see `state.exchange.Exchange`
    forward(unit, holders, grad, tag): sends the unit's gradient from its first holder to the other holders. Returns
        the messages to wait for.
    """

    def __init__(self, links: Links, stage: Stage, me: Member, wait: Wait, forward: Forward) -> None:
        self._links, self._stage, self._me, self._wait, self._forward = links, stage, me, wait, forward
        self._sums = ties.Ties(stage.gradients, stage.stage, stage.module.shared)

    @property
    def units(self) -> list[int]:
        """Numbers of this stage's tied units, see `numerics.ties`."""
        return self._sums.units

    def reduce(self, shares: Shares, reduced: Reduced, exponents: Tensor) -> Reduced:
        """Adds the sums of the other stages. Afterwards the holders of tied units have the gradients of these units,
        and all peers have the norms. May be called again.

        exponents: see `Ties.summed`

        Blocks until the other stages have their sums. Raises LinkBroken when the generation ends."""
        table = [*shares.holders.values()]
        mine = [unit for unit in self.units if shares.together or table[unit][0] == self._me]
        reduced = self._sums.summed(reduced, mine, self._exchanged(shares, reduced, mine), exponents)
        return self._sums.counted_once(reduced if shares.together else self._agreed(table, reduced, mine))

    def _exchanged(self, shares: Shares, reduced: Reduced, mine: list[int]) -> list[tuple[int, list[int], Tensor]]:
        """Exchanges parcels with members of other stages. A parcel contains one stage's sums of some units. Returns
        (sender's stage, units, parcel) for each received parcel."""
        table, layout = [*shares.holders.values()], self._stage.gradients.layout
        takes: dict[Member, list[int]] = {}
        gives: dict[Member, list[int]] = {}
        stages: dict[Member, int] = {}
        for name, stage, there in shares.elsewhere:
            unit = layout.number(name)
            here = table[unit] if shares.together else table[unit][:1]
            stages |= dict.fromkeys(there, stage)
            for number, member in enumerate(here):
                if member == self._me:
                    takes.setdefault(there[number % len(there)], []).append(unit)
            for number, member in enumerate(there):
                if here[number % len(here)] == self._me:
                    gives.setdefault(member, []).append(unit)
        for other, meeting in self._links.meetings(self._me, {*takes, *gives}):
            self._wait(meeting, other)
        found: list[tuple[int, list[int], Tensor]] = []
        coming: list[tuple[Pending, Member]] = []
        # Both sides of a pair use the same order, because NCCL messages have no tags.
        messages = [(other, self._me) for other in takes] + [(self._me, other) for other in gives]
        for frm, to in sorted(messages, key=lambda message: (sorted(message), message)):
            if to == self._me:
                units = self._in_order(takes[frm])
                room = self._sums.room(units)
                coming.append((self._links.receive(room, frm, OWN_SUMS), frm))
                found.append((stages[frm], units, room))
            else:
                parcel = self._sums.parcel(reduced, mine, self._in_order(gives[to]))
                self._links.send(parcel, to, OWN_SUMS)
        for pending, frm in coming:
            self._wait(pending, frm)
        return found

    def _agreed(self, table: list[list[int]], reduced: Reduced, mine: list[int]) -> Reduced:
        """Sends the gradients of tied units from their first holders to all holders, and the norms of these gradients
        to all peers. Returns `reduced` with these gradients and norms."""
        gradients, device = self._stage.gradients, self._stage.device
        counts, grads = gradients.largest_counts, gradients.grads(reduced)
        assert reduced.largest is not None
        largest = reduced.largest.split(counts)
        squares = [reduced.squares[unit] if unit in mine else 0.0 for unit in self.units]
        sums = torch.tensor([*squares, not reduced.finite], dtype=torch.float64, device=device)
        zeros = [largest[unit] if unit in mine else torch.zeros_like(largest[unit]) for unit in self.units]
        both = torch.cat(zeros)
        arriving: list[tuple[int, Tensor]] = []
        forwarded: list[Pending] = []
        for unit in self.units:
            grad = grads.get(unit)
            if grad is not None and unit not in mine:
                # Receives into new memory, because the message may still arrive after an abort.
                grad = torch.empty_like(grad)
                arriving.append((unit, grad))
            forwarded += self._forward(unit, table[unit], grad, TIED_GRADIENTS)
        self._wait(self._links.all_reduce([sums, both]))
        for pending in forwarded:
            self._wait(pending)
        for unit, grad in arriving:
            grads[unit].copy_(grad)
        *found, broken = sums.tolist()
        squares = list(reduced.squares)
        for unit, square in zip(self.units, found, strict=True):
            squares[unit] = square
        parts = dict(zip(self.units, both.split([counts[unit] for unit in self.units]), strict=True))
        everything = torch.cat([parts.get(unit, part) for unit, part in enumerate(largest)])
        finite = reduced.finite and not broken and math.isfinite(sum(squares))
        return replace(reduced, squares=squares, finite=finite, largest=everything)

    def _in_order(self, units: list[int]) -> list[int]:
        """The units in an order that both stages share, although they number units differently."""
        return sorted(units, key=self.units.index)
