"""Optimizer state that no worker has whole: what a worker says of its blocks, and what the coordinator makes of it.

    holdings = Holdings(me=1, sizes=[...], loaded=-1)     # a worker's; `participant.holdings`
    holdings.reported(); holdings.adopt(shares); holdings.took(block); holdings.settled(); holdings.commit()

    shards = Shards(copies=2)                             # the coordinator's
    shards.share(stage, {pipeline: holds}, committed)     # Shares: who holds what from now on; raises BlocksLost
    shards.stands(stage, peers)                           # whether what was shared out last is still so
    shards.difference(stage, {pipeline: checksums})       # a sentence: whose copies of a block are not the same

Like the ledger, the table rests on what live workers report alone: a block lies where a live worker says that it does,
as it is after the newest agreed step. So a heal may be interrupted at any point, and a new coordinator needs to know
nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from recycle_pp.wire.messages.workers import Holds, Shares

from .holders import Table, lost, missing, placed, refilled

NOTHING = -9  # as a step: none that could be agreed on


class BlocksLost(RuntimeError):
    """All copies of some blocks are gone."""

    def __init__(self, blocks: int, of: int) -> None:
        super().__init__(f"{blocks} of {of} blocks of the optimizer's state are lost")
        self.blocks, self.of = blocks, of


@dataclass
class Holdings:
    """What one worker has of its stage's state. Pure; guarded as its Participant is.

    me       its pipeline
    sizes    elements of every block of the stage
    loaded   the step after which it has the whole state, with which it began; None: no more
    weights  the newest step of which it has all weights; one less if it has all but these
    blocks   that it holds as they are after the newest committed step
    shares   what the present generation has given it, None before the first
    """

    me: int
    sizes: list[int]
    loaded: int | None
    weights: int = NOTHING
    blocks: set[int] = field(default_factory=set)
    shares: Shares | None = None

    def __post_init__(self) -> None:
        self.weights = NOTHING if self.loaded is None else self.loaded

    def reported(self) -> Holds:
        return Holds(self.sizes, sorted(self.blocks), self.loaded, self.weights)

    @property
    def mine(self) -> list[int]:
        """The blocks that this worker has to hold, in order."""
        assert self.shares is not None
        return [block for block, holders in enumerate(self.shares.holders) if self.me in holders]

    def join(self, committed: int) -> None:
        """Its first generation: what it began with is of use only if no step has been agreed since."""
        if self.loaded != committed:
            self.loaded, self.weights = None, NOTHING

    def adopt(self, shares: Shares) -> None:
        self.shares = shares

    def informed(self, committed: int) -> None:
        """It has the exponents after the newest step. Before the first copy: whoever holds a block has them."""
        self.weights = max(self.weights, committed - 1)

    def took(self, block: int) -> None:
        """A copy is complete here."""
        self.blocks.add(block)

    def settled(self) -> None:
        """It holds all that it has to, and gives up the rest of what it began with."""
        self.blocks |= set(self.mine)
        self.loaded = None

    def gathered(self, committed: int) -> None:
        """It has all weights after the newest step."""
        self.weights = committed

    def commit(self) -> None:
        """A step is agreed, hence all hold what they have to; what is held beyond that is out of date from here on."""
        self.blocks, self.loaded = set(self.mine), None


class Shards:
    """hosts: by (pipeline, stage), where a worker lives; names: by stage, what is in each block; as far as is known."""

    def __init__(self, copies: int) -> None:
        self.hosts: dict[tuple[int, int], str] = {}
        self.names: dict[int, list[str]] = {}
        self._copies = copies
        self._tables: dict[int, Table] = {}
        self._peers: dict[int, set[int]] = {}

    def stands(self, stage: int, peers: Collection[int]) -> bool:
        """Nobody has come or gone since `share`: who had reduced gradients to hold by then still has."""
        return self._peers.get(stage) == set(peers)

    def share(self, stage: int, holds: Mapping[int, Holds], committed: int) -> Shares:
        """Of a stage, from the reports of all its live workers, by pipeline.

        What stands stays as it is, whatever is held beyond it. BlocksLost: nobody holds some block. Who holds one knows
        all exponents.
        """
        sizes, peers = next(iter(holds.values())).sizes, sorted(holds)
        blocks = {peer: set(of.blocks) for peer, of in holds.items()}
        whole = [peer for peer in peers if holds[peer].loaded == committed]
        before = self._tables.get(stage) or [[] for _ in sizes]
        order = [dict.fromkeys([*holders, *peers]) for holders in before]
        held = [[p for p in of if p in holds and (block in blocks[p] or p in whole)] for block, of in enumerate(order)]
        if gone := lost(held):
            raise BlocksLost(len(gone), len(sizes))
        if not self.stands(stage, peers):
            began = len(whole) == len(peers) and not any(blocks.values())
            hosts = {p: self.hosts.get((p, stage), "") for p in peers}
            table = placed(sizes, peers, self._copies, hosts) if began else refilled(held, sizes, peers, self._copies)
            self._tables[stage], self._peers[stage] = table, set(peers)
        table = self._tables[stage]
        behind = any(of.weights < committed for of in holds.values())
        knows = next((p for p in peers if holds[p].weights >= committed - 1), None)
        return Shares(table, missing(held, table, sizes), knows if behind else None)

    def difference(self, stage: int, checksums: Mapping[int, bytes]) -> str | None:
        """What the holders of a block say of it, where they do not agree, in words: of the first such block. Where most
        of them agree, the others are wrong; of two nobody can tell which."""
        said = {peer: iter(array("q", of)) for peer, of in checksums.items()}
        for block, holders in enumerate(self._tables[stage]):
            by_value: dict[int, list[int]] = {}
            for peer in sorted(holders):
                by_value.setdefault(next(said[peer]), []).append(peer)
            if len(by_value) > 1:
                return self._in_words(stage, block, sorted(by_value.values(), key=len))
        return None

    def _in_words(self, stage: int, block: int, groups: list[list[int]]) -> str:
        what = f"block {block} of the optimizer's state of stage {stage}"
        if block < len(self.names.get(stage, [])):
            what += f" ({self.names[stage][block]})"
        if len(groups[-1]) == len(groups[-2]):
            all_of_them = [peer for group in groups for peer in group]
            return f"workers {self._workers(stage, all_of_them)} hold different copies of {what}"
        wrong, right = [peer for group in groups[:-1] for peer in group], groups[-1]
        verb = "worker {} holds" if len(wrong) == 1 else "workers {} hold"
        return f"{verb.format(self._workers(stage, wrong))} another copy of {what} than {self._workers(stage, right)}"

    def _workers(self, stage: int, peers: list[int]) -> str:
        hosts = {peer: self.hosts.get((peer, stage)) for peer in sorted(peers)}
        *most, last = (f"{peer}.{stage}" + (f" on {host}" if host else "") for peer, host in hosts.items())
        return f"{', '.join(most)} and {last}" if most else last
