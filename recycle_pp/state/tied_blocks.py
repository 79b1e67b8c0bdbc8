"""The gradients of blocks that other stages hold as well, as those of an embedding that is the head too.

    tied = TiedBlocks(links, stage, optimizer, me, wait, forward)
    tied.blocks                                      # their numbers in this stage; none where nothing is tied
    reduced = tied.unite(shares, reduced)            # after `Exchange.reduce`; once in every generation

A tensor is cut in the same way in every stage that holds it. So the first holders of a block, one in each of its
stages, send each other their stage's own sums (`Reduced.shared`), add them in the order of the stages, as
`numerics.ties` does with whole tensors, and give the gradient to the others who hold the block in their stage. The norm
counts it once, at the first of its stages. `Shares.elsewhere` says who the other first holders are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from recycle_schedules import Worker
from torch import Tensor

from recycle_pp.comm.links import Links
from recycle_pp.comm.waiting import Pending
from recycle_pp.model.stage import Stage
from recycle_pp.numerics.gradients import Reduced
from recycle_pp.numerics.shards import ShardedOptimizer
from recycle_pp.wire.messages.workers import Shares

from .passing import OWN_SUMS, UNITED

Wait = Callable[..., None]
Forward = Callable[[int, list[int], int], list[Pending]]


class TiedBlocks:
    """wait(pending, giver): as that of `state.shards.Exchange`. forward(block, holders, tag): the block's gradient from
    its first holder to the others; what to wait for."""

    def __init__(
        self, links: Links, stage: Stage, optimizer: ShardedOptimizer, me: Worker, wait: Wait, forward: Forward
    ) -> None:
        self._links, self._stage, self._optimizer, self._me, self._wait = links, stage, optimizer, me, wait
        self._forward = forward
        names, of, shared = optimizer.names, stage.layout.blocks, stage.module.shared
        tensors = {block: stage.layout.names[about.tensor] for block, about in enumerate(of)}
        tied = [block for block, name in tensors.items() if name in shared]
        self.blocks = sorted(tied, key=names.__getitem__)  # the same order in every stage
        self._stages = {block: sorted(shared[tensors[block]]) for block in tied}

    def own(self, sums: dict[int, Tensor]) -> Tensor | None:
        """What `Reduced.shared` is here: of the blocks that this worker sums; None where nothing is tied."""
        if not self.blocks:
            return None
        empty = torch.empty(0, dtype=self._stage.gradients.dtype, device=self._stage.device)
        return torch.cat([empty, *(sums[block] for block in self.blocks if block in sums)])

    def unite(self, shares: Shares, reduced: Reduced) -> Reduced:
        """The sum over all stages, on all who hold its blocks, and what all peers know of it; any number of times.

        Blocks until the other stages have their sums; LinkBroken when the generation ends.
        """
        me = self._me.pipeline
        holders = {block: shares.holders[block] for block in self.blocks}
        self._optimizer.start_gradients(block for block in self.blocks if me in holders[block])
        grads = {block: self._optimizer.gradient(block) for block in self.blocks if me in holders[block]}
        first = [block for block in self.blocks if holders[block][0] == me]
        sums, finite = self._sums(first, shares, reduced)
        counts = self._stage.gradients.largest_counts
        squares = torch.zeros(len(self._stages) + 1, dtype=torch.float64, device=self._stage.device)
        largest = torch.zeros(sum(counts[block] for block in self.blocks), device=self._stage.device)
        places = dict(zip(self.blocks, largest.split([counts[block] for block in self.blocks]), strict=True))
        forwarded: list[Pending] = []
        for number, block in enumerate(self.blocks):
            if block in sums:
                self._optimizer.restore(block, sums[block])
                squares[number] = self._optimizer.squares(block, grads[block])
                if counts[block]:
                    places[block].copy_(self._optimizer.largest(block, grads[block]))
            forwarded += self._forward(block, holders[block], UNITED)
        squares[-1] = not finite
        self._wait(self._links.all_reduce([squares, largest]))
        for pending in forwarded:
            self._wait(pending)
        return self._known(reduced, squares.tolist(), places)

    def _sums(self, first: list[int], shares: Shares, reduced: Reduced) -> tuple[dict[int, Tensor], bool]:
        """(of each of these blocks the sum over the stages, whether all that went into any of them was finite)."""
        assert reduced.shared is not None
        spans, dtype = self._stage.layout.spans, self._stage.gradients.dtype
        # Each stage's own sum fits by half a bit and no more.
        wide = torch.int64 if dtype == torch.int32 else dtype
        here = self._me.stage
        own = dict(zip(first, reduced.shared.split([spans[b].stop - spans[b].start for b in first]), strict=True))
        good = torch.tensor([reduced.finite], dtype=dtype, device=self._stage.device)
        there = {(block, stage): Worker(pipeline, stage) for block, stage, pipeline in shares.elsewhere}
        coming: dict[tuple[int, int], tuple[Tensor, Pending]] = {}
        partners = {there[block, stage] for block in first for stage in self._stages[block] if stage != here}
        for other, meeting in self._links.meetings(self._me, partners):
            self._wait(meeting, other)
        for block in first:
            parcel = torch.cat([good, own[block]])
            for stage in self._stages[block]:
                if stage == here:
                    continue
                room = torch.empty_like(parcel)
                # One order for all messages, as NCCL has no tags: by block, by pair of stages, down before up.
                if here < stage:
                    self._links.send(parcel, there[block, stage], OWN_SUMS)
                coming[block, stage] = room, self._links.receive(room, there[block, stage], OWN_SUMS)
                if here > stage:
                    self._links.send(parcel, there[block, stage], OWN_SUMS)
        found, finite = {}, reduced.finite
        for block in first:
            total = torch.zeros_like(own[block], dtype=wide)
            for stage in self._stages[block]:
                if stage == here:
                    total += own[block]
                    continue
                room, pending = coming[block, stage]
                self._wait(pending, there[block, stage])
                finite = finite and bool(room[0])
                total += room[1:]
            found[block] = total
        return found, finite

    def _known(self, reduced: Reduced, summed: list[float], places: dict[int, Tensor]) -> Reduced:
        squares, counts = list(reduced.squares), self._stage.gradients.largest_counts
        for block, square in zip(self.blocks, summed, strict=False):
            squares[block] = square
        finite = reduced.finite and not summed[-1] and math.isfinite(sum(squares))
        for block in self.blocks:
            if self._stages[block][0] != self._me.stage:
                squares[block] = 0.0
        largest = reduced.largest
        if largest is not None:
            largest = largest.clone()
            of = largest.split(counts)
            for block, place in places.items():
                of[block].copy_(place)
        return replace(reduced, squares=squares, finite=finite, largest=largest)
