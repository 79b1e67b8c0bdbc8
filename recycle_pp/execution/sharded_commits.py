"""The end of a step where the optimizer's state is sharded: as `Commits`, but for what no worker has whole.

    commits = ShardedCommits(session, stage, optimizer, faults, spans, batches)

`reduce` gives each block's gradient to its holders, and the vote says that this worker has its own: so a commit means
that all copies of every block can be updated, and from there on everything rolls forward. Before it, a death voids the
reduction of its stage and nothing else: the accumulators are as they were. After it, `spread` sends the new weights; a
generation that finds somebody without them sends them again (`begin`), once missing copies are made. A staggered
optimizer updates and sends ahead of the commit; what is taken back is undone by the holders, and the old weights are
sent again.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

import torch

from recycle_pp.data.batches import Batches
from recycle_pp.model.stage import Stage, digests
from recycle_pp.numerics.shards import ShardedOptimizer
from recycle_pp.protocol.holdings import Holdings
from recycle_pp.protocol.participant import Orders
from recycle_pp.state.shards import Exchange
from recycle_pp.wire.messages.workers import Commit, Shares

from .commits import Commits
from .injection import Injector
from .session import Session
from .spans import Spans, named


class ShardedCommits(Commits):
    def __init__(
        self,
        session: Session,
        stage: Stage,
        optimizer: ShardedOptimizer,
        faults: Injector,
        spans: Spans,
        batches: Batches | None = None,
    ) -> None:
        super().__init__(session, stage, optimizer, faults, spans, batches)  # type: ignore[arg-type]  # see `_apply`
        self._sharded = optimizer
        self._spread = -1, -1  # the newest generation and step whose weights were sent
        self._exchange = Exchange(session.links, stage, optimizer, session.participant.worker, self._wait)

    def begin(self, orders: Orders) -> None:
        """Makes the copies that this worker lacks, then the weights of all who lack some."""
        session, holdings, shares = self._session, self._holdings, _of(orders)
        committed = session.participant.committed
        self._waits_for = "copy"
        session.doing.works("R", committed + 1)
        if shares.knows is not None:
            self._exchange.exponents(shares.knows)
            self._say(orders, lambda: holdings.informed(committed))
        coming = {block for block, _, to in shares.copies if to == holdings.me}
        for block in set(holdings.mine) - coming - self._sharded.shards.keys():
            self._sharded.begin(block)
        self._faults.strike("heal", committed + 1) if shares.copies else None
        self._exchange.copies(shares, lambda block: self._say(orders, lambda: holdings.took(block)))
        self._say(orders, holdings.settled)
        self._sharded.settled()
        if shares.knows is not None:
            self.spread(orders, committed)

    def spread(self, orders: Orders, step: int) -> None:
        """Everybody gets the weights after that step of the blocks that it does not hold; once in a generation."""
        if self._spread == (orders.generation, step):
            return
        self._spread = orders.generation, step
        self._waits_for = "copy"
        self._session.doing.works("R", step + 1)
        self._faults.strike("spread", step)
        ahead, known = self._sharded.is_ahead, self._holdings.weights == step
        with named("recycle/weights"):
            self._exchange.weights(_of(orders), self._peers(orders), ahead, known)
        self._say(orders, lambda: self._holdings.gathered(step))

    def speculate(self, orders: Orders, step: int) -> bool:
        """All peers come to the same step's `spread` in every generation, whether they have updated their blocks ahead
        of the agreement, now or in an earlier one, or wait for it: so none has to know what the others did. Where it is
        taken back, the coordinator has the weights sent again (`Shares.knows`)."""
        speculates = super().speculate(orders, step)
        if self._session.participant.applied == step:
            self.spread(orders, step)
        return speculates

    def reduce(self, orders: Orders, step: int) -> None:
        """From the accumulators, which stay: a death before the commit has it done again."""
        doing = self._session.doing
        doing.works("R", step)
        self._waits_for = "sum"
        with self._spans.span(step, "R"), named("recycle/reduce"):
            sent = lambda: self._faults.fire("allreduce", step)  # noqa: E731
            reduced = self._exchange.reduce(_of(orders), self._peers(orders), sent)
        doing.works("R", step)
        self._hold(orders, step, reduced)

    def unite(self, orders: Orders, step: int, tag: int) -> None:
        if self._exchange.tied.blocks:
            self._session.check(orders)
            self._waits_for = "sum"
            with named("recycle/ties"):
                self.reduced[step] = self._exchange.tied.unite(_of(orders), self.reduced[step])

    def digests(self, orders: Orders) -> dict[str, str]:
        if self._stage.flat.dtype == torch.float32:
            return self._stage.digests()
        self._waits_for = "copy"
        found: dict[str, str] = {}
        for name, master in self._exchange.masters(_of(orders), self._peers(orders)):
            found |= digests({name: master.cpu()})
        return found

    def _inspected(self) -> tuple[bytes, list[int]]:
        """The state, as after the last step: each holder has come to it by itself."""
        checksums, changed = self._sharded.inspected()
        return array("q", checksums.values()).tobytes(), changed

    def _apply(self, commit: Commit, speculated: bool) -> None:
        if speculated:
            self._sharded.confirm()
            return
        self._faults.fire("optimizer", commit.step)
        with self._spans.span(commit.step + 1, "O"), named("recycle/O"):
            self._sharded.step(self.reduced[commit.step], commit.step, commit.scale)

    @property
    def _holdings(self) -> Holdings:
        holdings = self._session.participant.holdings
        assert holdings is not None
        return holdings

    def _peers(self, orders: Orders) -> list[int]:
        """The pipelines of the stage's live workers."""
        with self._session.lock:
            self._session.check(orders)
            announced = self._session.participant.announced
            assert announced is not None
            return sorted(w.pipeline for w in announced.members if w.stage == self._stage.stage)

    def _say(self, orders: Orders, change: Callable[[], None]) -> None:
        """Counts only if the orders still stand: else the report has said what this worker has."""
        with self._session.lock:
            self._session.check(orders)
            change()


def _of(orders: Orders) -> Shares:
    assert orders.shares is not None
    return orders.shares
