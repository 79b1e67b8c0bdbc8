"""Transfers units' state and gradients between the workers of a stage, by messages or by collectives.

    way = passing(links, me, wait)
    pending = way.give(tensor, source, takers, tag)          # from one worker to some peers
    for run, total in way.totals(sums, peers, rounds, sent): # sums each run (neighbouring units) at its first holder

Point-to-point messages (TCP) send the fewest bytes and involve only the sender and the receivers. NCCL requires a fixed
order of all operations of a worker, and memory for each connection. With NCCL, all peers therefore take part in every
transfer (`collective`), in the group that also sums their gradients. One broadcast per worker sends as many bytes as a
ring all-gather.

All calls block only in `wait`, and raise LinkBroken when the generation ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Protocol

import torch
from torch import Tensor

from recycle_pp.comm.links import Links
from recycle_pp.comm.tcp.transport import MAX_TAG
from recycle_pp.comm.waiting import Pending
from recycle_pp.numerics.layout import LayerMemory
from recycle_pp.wire.messages.members import Member

from .runs import Run

PIECE = 1 << 18  # elements that a worker receives from each peer at a time
AHEAD = 3  # number of reductions that may still be in flight when the next one starts
# message tags, larger than all tags of mailboxes
SUMS, GRADIENTS, STATE, WEIGHTS, MASTERS, OWN_SUMS, TIED_GRADIENTS = range(MAX_TAG - 7, MAX_TAG)

Rounds = Iterable[Sequence[Run | None]]


class Passing(Protocol):
    """The transfers between the workers of a stage. All members of the stage make the same calls in the same order."""

    collective: bool
    """Whether a worker must also call `give` for transfers between other workers, with a scratch buffer."""

    def give(self, tensor: Tensor, source: Member, takers: Collection[Member], tag: int) -> Pending:
        """Sends `tensor` from `source` to the takers. `tensor` must be contiguous, and must not change until it has
        arrived."""

    def totals(
        self, sums: LayerMemory, peers: Sequence[Member], rounds: Rounds, sent: Callable[[], None]
    ) -> Iterator[tuple[Run, Tensor | None]]:
        """(run, sum over all peers) for each run. The sum is None unless this worker is the first holder of the run.
        Does not change `sums`.

        sent(): called after this worker's first message
        """


def passing(links: Links, me: Member, wait: Callable[[Pending], None]) -> Passing:
    return Together(links, me, wait) if links.ordered else ByMessages(links, me, wait)


class ByMessages:
    """Point-to-point messages. A worker that sums a run receives it from each peer piece by piece.

    The worker thus needs memory for only one piece per peer, and senders need no buffer. No peer is more than one piece
    ahead of another, because each peer also waits for the pieces of its own run.
    """

    collective = False

    def __init__(self, links: Links, me: Member, wait: Callable[[Pending], None]) -> None:
        self._links, self._me, self._wait = links, me, wait

    def give(self, tensor: Tensor, source: Member, takers: Collection[Member], tag: int) -> Pending:
        if source != self._me:
            return self._links.receive(tensor, source, tag)
        for taker in takers:
            self._links.send(tensor, taker, tag)
        return Pending(None)

    def totals(
        self, sums: LayerMemory, peers: Sequence[Member], rounds: Rounds, sent: Callable[[], None]
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
        sums: LayerMemory,
        run: Run | None,
        runs: Mapping[Member, Run | None],
        rooms: Mapping[Member, Tensor],
        sent: Callable[[], None],
    ) -> Tensor:
        """Sums this worker's run over all peers, piece by piece. Also sends each peer the pieces of its run.

        rooms: peer -> buffer for one piece
        """
        total = torch.empty(0 if run is None else run.size, dtype=sums.dtype, device=sums.device)
        for pieces in zip_longest(*(of.pieces(PIECE) if of else [] for of in runs.values())):
            mine, coming = None, []
            for peer, piece in zip(runs, pieces, strict=True):
                if piece is not None and peer != self._me:
                    self._links.send(sums[piece], peer, SUMS)
                elif piece is not None:
                    mine, size = piece, piece.stop - piece.start
                    coming = [self._links.receive(room[:size], p, SUMS) for p, room in rooms.items()]
            sent()
            sent = _nothing
            for pending in coming:
                self._wait(pending)
            if run is not None and mine is not None:
                part = total[mine.start - run.span.start : mine.stop - run.span.start]
                _sum([rooms[peer][: len(part)] if peer in rooms else sums[mine] for peer in runs], part)
        return total


class Together:
    """Transfers by collectives, in which all peers take part. Several may be in flight, in the order of the calls."""

    collective = True

    def __init__(self, links: Links, me: Member, wait: Callable[[Pending], None]) -> None:
        self._links, self._me, self._wait = links, me, wait

    def give(self, tensor: Tensor, source: Member, takers: Collection[Member], tag: int) -> Pending:
        return self._links.broadcast([tensor], source)

    def totals(
        self, sums: LayerMemory, peers: Sequence[Member], rounds: Rounds, sent: Callable[[], None]
    ) -> Iterator[tuple[Run, Tensor | None]]:
        under_way: deque[tuple[Run, Tensor, Pending]] = deque()
        for run in (run for runs in rounds for run in runs if run is not None):
            total = sums[run.span].clone()
            under_way.append((run, total, self._links.reduce([total], run.holders[0])))
            sent()
            sent = _nothing
            if len(under_way) > AHEAD:
                yield self._summed(*under_way.popleft())
        for each in under_way:
            yield self._summed(*each)

    def _summed(self, run: Run, total: Tensor, pending: Pending) -> tuple[Run, Tensor | None]:
        self._wait(pending)
        return run, total if run.holders[0] == self._me else None


def _sum(contributions: Sequence[Tensor], out: Tensor) -> None:
    """Writes the sum of the contributions to `out`. Adds them in the given order, which determines the rounding."""
    first, *others = contributions
    if not others:
        out.copy_(first)
        return
    torch.add(first, others[0], out=out)
    for contribution in others[1:]:
        out += contribution


def _nothing() -> None:
    pass
