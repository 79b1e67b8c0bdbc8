"""How the workers of a stage pass each other parts of a vector: by messages between two of them, or together.

    way = passing(links, me, wait)
    pending = way.give(tensor, source, takers, tag)          # from one worker to some
    for run, total in way.totals(sums, peers, rounds, sent): # each run's sum over all, at who sums it

Messages (TCP) are the fewest bytes, and a worker has its part in nothing else. NCCL wants one order for all that a
worker does, and memory for each connection: there the peers do everything together, in the group that they have for
their sums anyway. So each takes part in whatever any two of them pass (`everybody`), and a ring of D that broadcasts
from every worker in turn sends as much as one that gathers.

Everything blocks in `wait` alone, and ends with LinkBroken when the generation does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Protocol

import torch
from recycle_schedules import Worker
from torch import Tensor

from recycle_pp.comm.links import Links
from recycle_pp.comm.tcp.transport import MAX_TAG
from recycle_pp.comm.waiting import Pending

from .shard_runs import Run

PIECE = 1 << 18  # elements of sums that a worker takes from each peer at a time
AHEAD = 3  # runs that are summed while one is waited for
SUMS, GRADIENTS, STATE, WEIGHTS, MASTERS, OWN_SUMS, UNITED = range(MAX_TAG - 7, MAX_TAG)  # no mailbox counts so far

Rounds = Iterable[Sequence[Run | None]]


class Passing(Protocol):
    """Workers are called by their pipeline. All of a stage call the same, in the same order."""

    everybody: bool
    """Whether a worker calls `give` for what others pass, too, with memory of the right size that holds garbage
    afterwards."""

    def give(self, tensor: Tensor, source: int, takers: Collection[int], tag: int) -> Pending:
        """The tensor of `source`, into those of the takers. Contiguous; not to be written to until it has arrived."""

    def totals(
        self, sums: Tensor, peers: Sequence[int], rounds: Rounds, sent: Callable[[], None]
    ) -> Iterator[tuple[Run, Tensor | None]]:
        """Each run, with the sum of that part of `sums` over all peers where this worker is its first holder. `sums`
        stays as it is. sent(): called when this worker has sent its first."""


def passing(links: Links, me: Worker, wait: Callable[[Pending], None]) -> Passing:
    return Together(links, me, wait) if links.ordered else ByMessages(links, me, wait)


class ByMessages:
    """A worker that sums a run takes a piece of it from every peer at a time, so that it needs memory for these and not
    for a second set of sums: they are sent from where they are. A peer may be a piece ahead, not more: it waits for its
    own."""

    everybody = False

    def __init__(self, links: Links, me: Worker, wait: Callable[[Pending], None]) -> None:
        self._links, self._me, self._stage, self._wait = links, me.pipeline, me.stage, wait

    def give(self, tensor: Tensor, source: int, takers: Collection[int], tag: int) -> Pending:
        if source != self._me:
            return self._links.receive(tensor, self._worker(source), tag)
        for taker in takers:
            self._links.send(tensor, self._worker(taker), tag)
        return Pending(None)

    def totals(
        self, sums: Tensor, peers: Sequence[int], rounds: Rounds, sent: Callable[[], None]
    ) -> Iterator[tuple[Run, Tensor | None]]:
        rooms = {peer: torch.empty(PIECE, dtype=sums.dtype, device=sums.device) for peer in peers if peer != self._me}
        for runs in rounds:
            for run in runs:
                if run is not None and run.holders[0] != self._me:
                    yield run, None
            mine = runs[list(peers).index(self._me)]
            total = self._total(sums, mine, dict(zip(peers, runs, strict=True)), rooms, sent)
            sent = _nothing
            if mine is not None:
                yield mine, total

    def _total(
        self,
        sums: Tensor,
        run: Run | None,
        runs: Mapping[int, Run | None],
        rooms: Mapping[int, Tensor],
        sent: Callable[[], None],
    ) -> Tensor:
        """The sum over all peers of this worker's run of a round, piece by piece; each peer gets the pieces of its own.
        rooms: memory for a piece of each other peer."""
        total = sums[:0] if run is None else torch.empty_like(sums[run.span])
        for pieces in zip_longest(*(of.pieces(PIECE) if of else [] for of in runs.values())):
            mine, coming = None, []
            for peer, piece in zip(runs, pieces, strict=True):
                if piece is not None and peer != self._me:
                    self._links.send(sums[piece], self._worker(peer), SUMS)
                elif piece is not None:
                    mine, size = piece, piece.stop - piece.start
                    coming = [self._links.receive(room[:size], self._worker(p), SUMS) for p, room in rooms.items()]
            sent()
            sent = _nothing
            for pending in coming:
                self._wait(pending)
            if run is not None and mine is not None:
                part = total[mine.start - run.span.start : mine.stop - run.span.start]
                _sum([rooms[peer][: len(part)] if peer in rooms else sums[mine] for peer in runs], part)
        return total

    def _worker(self, pipeline: int) -> Worker:
        return Worker(pipeline, self._stage)


class Together:
    """Sums and broadcasts of all peers, some of them under way: the order in which they are asked for is the order in
    which they happen."""

    everybody = True

    def __init__(self, links: Links, me: Worker, wait: Callable[[Pending], None]) -> None:
        self._links, self._me, self._wait = links, me, wait

    def give(self, tensor: Tensor, source: int, takers: Collection[int], tag: int) -> Pending:
        return self._links.broadcast([tensor], Worker(source, self._me.stage))

    def totals(
        self, sums: Tensor, peers: Sequence[int], rounds: Rounds, sent: Callable[[], None]
    ) -> Iterator[tuple[Run, Tensor | None]]:
        under_way: deque[tuple[Run, Tensor, Pending]] = deque()
        for run in (run for runs in rounds for run in runs if run is not None):
            total = sums[run.span].clone()
            under_way.append((run, total, self._links.reduce([total], Worker(run.holders[0], self._me.stage))))
            sent()
            sent = _nothing
            if len(under_way) > AHEAD:
                yield self._summed(*under_way.popleft())
        for each in under_way:
            yield self._summed(*each)

    def _summed(self, run: Run, total: Tensor, pending: Pending) -> tuple[Run, Tensor | None]:
        self._wait(pending)
        return run, total if run.holders[0] == self._me.pipeline else None


def _sum(contributions: Sequence[Tensor], out: Tensor) -> None:
    """In the order of the workers; none of them changes."""
    first, *others = contributions
    if not others:
        out.copy_(first)
        return
    torch.add(first, others[0], out=out)
    for contribution in others[1:]:
        out += contribution


def _nothing() -> None:
    pass
