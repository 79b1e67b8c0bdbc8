"""The state of a simulated worker: the newest step in each block, and the messages about blocks.

The code mirrors `execution.commits` and `state.exchange`, message by message. A death, a cut or a delay may affect
any message, and the version of a block is checked at each use. Whole state is sharded state whose blocks all workers
hold.

A bit flip makes a block wrong, and everything derived from it: copies, weights, tensors, sums. The protocol does not
know this until a vote detects it. Wrong values must not be committed, saved or applied.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable
from functools import cache
from typing import TYPE_CHECKING

from recycle_pp.protocol.holdings import NOTHING
from recycle_pp.protocol.participant import Orders
from recycle_pp.wire.messages.generations import Shares
from recycle_pp.wire.messages.units import UnitId

if TYPE_CHECKING:
    from .node import Node

Program = Generator[Callable[[], bool] | None, None, None]
SIZES = [[128, 256], [128, 384, 128]]  # elements of the blocks in even-numbered and in odd-numbered layers

LACKING = "a block of some tensor is in none of the parts"
WRONG = (-1, (-1, -1))  # in a counter of sums: derived from a wrong block

Sums = Counter[tuple[int, tuple[int, int]]]
"""(layer, micro-batch) -> the number of times that this gradient is in the sum"""


def described(layers: Iterable[int]) -> dict[int, list[tuple[str, int]]]:
    """The blocks of these layers, as in `Ready.units`."""
    return {layer: [(f"{layer}.{n}", size) for n, size in enumerate(SIZES[layer % 2])] for layer in layers}


def blocks_of(layers: Iterable[int]) -> list[UnitId]:
    return [unit for layer in layers for unit in _blocks_in(layer)]


@cache
def _blocks_in(layer: int) -> list[UnitId]:
    return [UnitId(layer, number) for number in range(len(SIZES[layer % 2]))]


class Shards:
    """state: held block -> newest step in it
    weights: newest step in each block's weights
    exponents: newest step in each layer's exponents
    wrong: block with wrong state -> its fault; positive if a seal detects it
    tainted: blocks with wrong weights"""

    def __init__(self, node: Node, layers: Collection[int], loaded: int) -> None:
        self._node, self._loaded = node, loaded
        self.state: dict[UnitId, int] = {}
        self.weights = dict.fromkeys(blocks_of(layers), loaded)
        self.exponents = dict.fromkeys(layers, loaded)
        self.wrong: dict[UnitId, int] = {}
        self.tainted: set[UnitId] = set()
        self.miscomputes = 0  # fault that makes the next update wrong
        self._reported: list[UnitId] = []  # blocks that were wrong at the last vote
        self._grads: dict[UnitId, Sums] = {}
        self._first: set[UnitId] = set()
        self._undo: tuple[dict[UnitId, int], dict[int, int]] | None = None  # state and exponents before an early update
        self._sent_weights = -1, -1  # newest generation and step whose weights were sent
        self._exchanges = 0, -1  # number of exchanges, generation

    def relayout(self, layers: Collection[int], arrived: Shards) -> None:
        """Gives the stage these layers. arrived: blocks of new layers that have arrived; the stage lacks the others."""
        step = self._node.me.committed
        came = {block: of for block, of in arrived.state.items() if of == step and block.layer in layers}
        blocks, nothing = blocks_of(layers), dict.fromkeys(layers, NOTHING)
        self.state = {block: step for block, step in (self.state | came).items() if block.layer in layers}
        self.weights = {block: came.get(block, self.weights.get(block, NOTHING)) for block in blocks}
        exponents = nothing | {block.layer: step for block in came} | self.exponents
        self.exponents = {layer: exponents[layer] for layer in layers}
        wrong = {block: of for block, of in arrived.wrong.items() if block in came}
        self.wrong = {block: of for block, of in (self.wrong | wrong).items() if block in self.state}
        self.tainted = {block for block in self.tainted | wrong.keys() if block.layer in layers}

    def begin(self, orders: Orders) -> Program:
        node, shares, holdings = self._node, _of(orders), self._node.me.holdings
        me, committed = node.me.member, node.me.committed
        if shares.knows is not None:
            key = self._key(orders, "exponents")
            if shares.knows == me:
                if {*self.exponents.values()} != {committed}:
                    node.world.fail(f"{node.me.worker} sends exponents after step {self.exponents}, not {committed}")
                for peer in node.peers():
                    node.send(orders, peer, key, dict(self.exponents))
                    yield None
            else:
                yield from node.receive(orders, shares.knows, key)
                self.exponents = node.arrived
            node.check(orders)
            holdings.informed(committed)
        coming = {block for block, _, to in shares.copies if to == me}
        given = {block for block, source, _ in shares.copies if source == me}
        for block in ({*holdings.mine} | given) - coming - self.state.keys():
            self.state[block] = self.weights[block] = self._loaded
        key = self._key(orders, "copies")
        for block, source, to in shares.copies:
            if source == me:
                if self.state[block] != committed:
                    node.world.fail(f"{node.me.worker} copies block {block} after step {self.state[block]}")
                node.send(orders, to, (key, block), (self.state[block], self.wrong.get(block)))
                yield None
            if to == me:
                yield from node.receive(orders, source, (key, block))
                state, wrong = node.arrived
                self.state[block] = self.weights[block] = state
                self._taint(block, wrong)
                node.check(orders)
                holdings.took(block)
        node.check(orders)
        holdings.settled()
        if shares.knows is not None:
            yield from self.send_weights(orders, committed)

    def send_weights(self, orders: Orders, step: int) -> Program:
        """Sends weights to peers, once per step and generation, after the update (early or at the commit)."""
        node, shares, me = self._node, _of(orders), self._node.me.member
        if self._sent_weights == (orders.generation, step):
            return
        self._sent_weights = orders.generation, step
        key = self._key(orders, "weights")
        for block, holders in shares.holders.items():
            if holders[0] == me:
                for peer in node.peers():
                    if peer not in holders:
                        node.send(orders, peer, (key, block), (self.state[block], self.wrong.get(block)))
                        yield None
        for block, holders in shares.holders.items():
            if me not in holders:
                yield from node.receive(orders, holders[0], (key, block))
                self.weights[block], wrong = node.arrived
                self.tainted = self.tainted - {block} if wrong is None else self.tainted | {block}
        node.check(orders)
        node.me.holdings.gathered(step)
        self.check_weights(step)

    def reduce(self, orders: Orders, sums: Sums) -> Program:
        """Sends sums to the first holders, and gradients from there to the others."""
        node, shares = self._node, _of(orders)
        if shares.together:
            return
        me, key = node.me.member, self._key(orders, "sums")
        self._grads = {block: _part(sums, block) for block, holders in shares.holders.items() if me in holders}
        self._first = {block for block, holders in shares.holders.items() if holders[0] == me}
        for block, holders in shares.holders.items():
            if holders[0] != me:
                node.send(orders, holders[0], (key, block), _part(sums, block))
                yield None
                continue
            for peer in node.peers():
                yield from node.receive(orders, peer, (key, block))
                self._grads[block].update(node.arrived)
            for holder in holders[1:]:
                node.send(orders, holder, (key, "reduced", block), Counter(self._grads[block]))
                yield None
        self._reduction = key
        node.check(orders)

    def take_gradients(self, orders: Orders) -> Program:
        shares = _of(orders)
        if shares.together:
            return
        for block in self._grads.keys() - self._first:
            source = shares.holders[block][0]
            yield from self._node.receive(orders, source, (self._reduction, "reduced", block))
            self._grads[block] = self._node.arrived

    def hold(self, orders: Orders, total: Sums) -> None:
        """Takes the sums of the whole stage, if all peers hold all blocks."""
        if _of(orders).together:
            self._grads = {block: _part(total, block) for block in self._node.me.holdings.mine}

    def step(self, step: int, ahead: bool = False) -> None:
        node = self._node
        before, total = (dict(self.state), self.exponents), len(node.world.problem.microbatch_keys())
        if self._reported or any(WRONG in grad for grad in self._grads.values()):
            node.world.deceived(f"{node.me.worker} updates {list(self._grads)} although {self._reported} were wrong")
        for block, grad in self._grads.items():
            grad.pop(WRONG, None)
            if self.state[block] != step - 1 or set(grad.values()) != {1} or len(grad) != total:
                node.world.fail(f"{node.me.worker} updates block {block} after step {self.state[block]} with {grad}")
            self.state[block] = self.weights[block] = step
        self.exponents, self._undo = dict.fromkeys(self.exponents, step), before
        if not ahead:
            self.confirm()
        if self.miscomputes and self.state:
            self.wrong[min(self.state)], self.miscomputes = -self.miscomputes, 0
        self.wrong = {block: of for block, of in self.wrong.items() if block in self.state}
        for block in self.state:
            self._taint(block, self.wrong.get(block))

    def confirm(self) -> None:
        self.state = {block: self.state[block] for block in self._grads}
        self._grads, self._undo = {}, None

    def undo(self) -> None:
        """Rolls back an early update. Weights of blocks that others hold keep their new values until sent again."""
        assert self._undo is not None
        self.state, self.exponents = self._undo
        for block, step in self.state.items():
            self.weights[block] = step
        self._undo = None

    def inspected(self) -> tuple[bytes, list[UnitId]]:
        held, state = sorted(self._grads), self._undo[0] if self._undo else self.state
        self._reported = [block for block in held if block in self.wrong]
        # A wrong block that is not compared was used only through its weights, which no vote compares.
        if self.wrong.keys() - set(held):
            self._node.world.excused = True
        values = [1000 * state[block] + abs(self.wrong.get(block, 0)) for block in held]
        return array("q", values).tobytes(), [block for block in self._reported if self.wrong[block] > 0]

    @property
    def seen(self) -> bool:
        return any(of > 0 for of in self.wrong.values())

    def flip(self, fault: int, number: int) -> None:
        """Makes the `number`-th block wrong, or another one if this worker does not hold it."""
        blocks = blocks_of(self._node.layers)
        block = blocks[number % len(blocks)]
        if self.state:
            self._taint(block if block in self.state else min(self.state), fault)

    def digests(self) -> dict[str, str]:
        return {str(b): f"{s}, {self.wrong.get(b)}" for b, s in self.state.items()}

    def check_weights(self, step: int) -> None:
        node = self._node
        if {*self.weights.values(), *self.exponents.values()} != {step}:
            node.world.fail(f"{node.me.worker} uses weights {self.weights}, exponents {self.exponents}, not {step}")

    def given(self) -> dict[UnitId, tuple[int, int | None]]:
        """The state in a donor's parcel: block -> (step in it, its fault or None)."""
        return {block: (step, self.wrong.get(block)) for block, step in self.state.items()}

    def after(self, step: int) -> set[UnitId]:
        """The held blocks in their state after this step."""
        return {block for block, of in self.state.items() if of == step}

    def forget(self) -> None:
        """Drops all state, for a new session in which the worker follows its blocks."""
        self.state, self.wrong, self.tainted = {}, {}, set()
        self.exponents = dict.fromkeys(self.exponents, NOTHING)

    def follow(
        self,
        blocks: Collection[UnitId],
        step: int,
        state: dict[UnitId, tuple[int, int | None]] | None,
        layers: Collection[int],
    ) -> None:
        """Takes a donor's parcel. state: None for a step's gradients. layers: layers with exponents in the parcel."""
        for block in blocks:
            self.state[block] = self.weights[block] = step
            if state is not None:
                if state[block][0] != step:
                    self._node.world.fail(f"block {block} is sent as after step {state[block][0]}, not {step}")
                self._taint(block, state[block][1])
        self.exponents |= {layer: max(self.exponents[layer], step) for layer in layers}

    def apply(self, step: int, sums: Sums) -> None:
        """Updates the state of an understudy, which has all blocks."""
        for block in self.weights:
            grad, total = _part(sums, block), len(self._node.world.problem.microbatch_keys())
            if self.state[block] != step - 1 or set(grad.values()) != {1} or len(grad) != total:
                self._node.world.fail(f"an understudy updates {block} after step {self.state[block]} with {grad}")
        self.follow(list(self.weights), step, None, list(self.exponents))

    def saved(self, step: int, units: Collection[UnitId]) -> dict[UnitId, bool]:
        """The saved blocks: block -> whether it is right."""
        node = self._node
        if any(of != step for of in self.state.values()):
            node.world.fail(f"{node.me.worker} saves {self.state} as after step {step}")
        return {b: b not in self.wrong for b in self.state if b in units}

    def _taint(self, block: UnitId, wrong: int | None) -> None:
        if wrong is None:
            self.wrong.pop(block, None)
            self.tainted.discard(block)
        else:
            self.wrong[block] = wrong
            self.tainted.add(block)

    def _key(self, orders: Orders, what: str) -> tuple[str, int]:
        """A key for an exchange. All peers run the exchanges of a generation in the same order."""
        count, generation = self._exchanges
        count = count + 1 if generation == orders.generation else 0
        self._exchanges = count, orders.generation
        return what, count


def _of(orders: Orders) -> Shares:
    assert orders.shares is not None
    return orders.shares


def _part(sums: Sums, block: UnitId) -> Sums:
    """The sums of a block's layer."""
    return Counter({key: n for key, n in sums.items() if key[0] == block.layer or key == WRONG})
