"""The coordinator's part of optimizer state that no worker has whole: who of a stage holds which block.

    shards = Shards(copies=2)
    void = shards.void(reports, records)              # stages that have to sum again
    shares = shards.share_out(reports, committed)     # by stage: who holds what from now on; raises StageLost
    shards.compare(votes, step)                       # raises ProtocolViolation: copies are not the same

Like the ledger, the table rests on what live workers report alone: a block lies where a live worker says that it does,
as it is after the newest agreed step. So a heal may be interrupted at any point, and a new coordinator needs to know
nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Mapping

from msgspec import structs
from recycle_schedules import Worker

from recycle_pp.wire.messages.workers import Holds, Report, Shares, Vote

from .commit import ProtocolViolation
from .holders import Table, lost, missing, placed, refilled
from .ledger import Record
from .stage_lost import StageLost


class Shards:
    """hosts: by (pipeline, stage), where a worker lives; names: by stage, what is in each block; as far as is known."""

    def __init__(self, copies: int) -> None:
        self.hosts: dict[tuple[int, int], str] = {}
        self.names: dict[int, list[str]] = {}
        self._copies = copies
        self._tables: dict[int, Table] = {}
        self._peers: dict[int, set[int]] = {}

    def void(self, reports: Mapping[Worker, Report], records: Mapping[Worker, Record]) -> set[int]:
        """The stages whose reduced gradients are void, from what all live workers say; before `share_out`.

        Reduced gradients of a step that is not agreed lie with the holders of their blocks: where one of the stage has
        died, or lacks its own, all of it is summed again, from accumulators that everybody keeps until the commit.
        `records` of such a stage are not `reduced` any more.
        """
        found = set()
        for stage, peers in _stages(reports).items():
            if not self.stands(stage, [w.pipeline for w in peers]) or not all(records[w].reduced for w in peers):
                found |= {stage for w in peers if records[w].reduced}
                for worker in peers:
                    records[worker].reduced = False
        return found

    def share_out(self, reports: Mapping[Worker, Report], committed: int, took_back: bool = False) -> dict[int, Shares]:
        """Of each stage who holds what from now on. took_back: updates of the step that is not agreed are undone, so
        weights that they have sent are, too."""
        shares = {}
        for stage, peers in _stages(reports).items():
            holds = {w.pipeline: of for w in peers if (of := reports[w].holds) is not None}
            mixed = took_back and any(reports[w].ahead for w in peers)
            shares[stage] = self.share(stage, holds, committed, mixed)
        return {stage: structs.replace(of, elsewhere=self._elsewhere(stage)) for stage, of in shares.items()}

    def compare(self, votes: Mapping[Worker, Vote], step: int) -> None:
        """The holders of a block have updated it each for itself: raises ProtocolViolation if their results differ.
        votes: of all live workers."""
        for stage in _stages(votes):
            checksums = {w.pipeline: vote.blocks for w, vote in votes.items() if w.stage == stage}
            if (wrong := self.difference(stage, checksums)) is not None:
                raise ProtocolViolation(
                    f"{wrong}, found in step {step}: memory or a processor has failed, and the job must "
                    "not go on with wrong weights; run.resume=true goes on at the newest checkpoint"
                )

    def stands(self, stage: int, peers: Collection[int]) -> bool:
        """Nobody has come or gone since `share`: who had reduced gradients to hold by then still has."""
        return self._peers.get(stage) == set(peers)

    def share(self, stage: int, holds: Mapping[int, Holds], committed: int, mixed: bool = False) -> Shares:
        """Of a stage, from the reports of all its live workers, by pipeline. mixed: their weights are not all of one
        step.

        What stands stays as it is, whatever is held beyond it. StageLost: nobody holds some block. Who holds one knows
        all exponents.
        """
        sizes, peers = next(iter(holds.values())).sizes, sorted(holds)
        blocks = {peer: set(of.blocks) for peer, of in holds.items()}
        whole = [peer for peer in peers if holds[peer].loaded == committed]
        before = self._tables.get(stage) or [[] for _ in sizes]
        order = [dict.fromkeys([*holders, *peers]) for holders in before]
        held = [[p for p in of if p in holds and (block in blocks[p] or p in whole)] for block, of in enumerate(order)]
        if gone := lost(held):
            raise StageLost(stage, f"no copy left of {len(gone)} of its {len(sizes)} blocks")
        if not self.stands(stage, peers):
            began = len(whole) == len(peers) and not any(blocks.values())
            hosts = {p: self.hosts.get((p, stage), "") for p in peers}
            table = placed(sizes, peers, self._copies, hosts) if began else refilled(held, sizes, peers, self._copies)
            self._tables[stage], self._peers[stage] = table, set(peers)
        table = self._tables[stage]
        behind = mixed or any(of.weights < committed for of in holds.values())
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

    def _elsewhere(self, stage: int) -> list[tuple[int, int, int]]:
        """A block that several stages hold has the same name in all of them."""
        found = []
        for other, names in sorted(self.names.items()):
            if other != stage and (common := set(names) & {*self.names.get(stage, ())}):
                mine = {name: block for block, name in enumerate(self.names[stage])}
                firsts = zip(names, self._tables[other], strict=True)
                found += [(mine[name], other, holders[0]) for name, holders in firsts if name in common]
        return found

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


def _stages(workers: Iterable[Worker]) -> dict[int, list[Worker]]:
    found: dict[int, list[Worker]] = {}
    for worker in sorted(workers):
        found.setdefault(worker.stage, []).append(worker)
    return dict(sorted(found.items()))
