"""The coordinator's part of optimizer state that no worker has whole: who of a stage holds which block.

    shards = Shards(copies=2)
    void = shards.void(reports, records)              # stages that have to sum again
    shares = shards.share_out(reports, committed)     # by stage: who holds what from now on; raises StageLost
    wrong = shards.compare(votes, step)               # whose copies are wrong; raises ProtocolViolation

Like the ledger, the table rests on what live workers report alone: a block lies where a live worker says that it does,
as it is after the newest agreed step. So a heal may be interrupted at any point, and a new coordinator needs to know
nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from msgspec import structs
from recycle_schedules import Worker

from recycle_pp.wire.messages.workers import Holds, Report, Shares, Vote

from .commit import ProtocolViolation
from .holders import Table, lost, missing, on_one_host, placed, refilled
from .ledger import Record
from .mismatch import compare
from .stage_lost import StageLost


class Shards:
    """hosts: by (pipeline, stage), where a worker lives; names: by stage, what is in each block; as far as is known."""

    def __init__(self, copies: int, third: bool = False) -> None:
        """third: who holds a wrong copy is to be found out (control.mismatch)."""
        self.hosts: dict[tuple[int, int], str] = {}
        self.names: dict[int, list[str]] = {}
        self._copies, self._third = copies, third
        self._tables: dict[int, Table] = {}
        self._peers: dict[int, set[int]] = {}
        self._made: dict[int, tuple[int, set[tuple[int, int]]]] = {}  # copies (block, to) since that step was agreed

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
            ahead = any(reports[w].ahead for w in peers)
            shares[stage] = self.share(stage, holds, committed, took_back and ahead, ahead and not took_back)
        return {stage: structs.replace(of, elsewhere=self._elsewhere(stage)) for stage, of in shares.items()}

    def compare(self, votes: Mapping[Worker, Vote], step: int) -> dict[Worker, str]:
        """The holders of a block have updated it each for itself: whose results are wrong, and in what, in words.

        Raises ProtocolViolation where that does not help: nobody can tell, or nobody is asked to. votes: of all live
        workers.
        """
        wrong: dict[Worker, str] = {}
        for stage in _stages(votes):
            of = {worker.pipeline: vote for worker, vote in votes.items() if worker.stage == stage}
            found = compare(self._tables[stage], of, self._made[stage][1])
            if found is None:
                continue
            if found.unclear or not self._third:
                first = (found.unclear or [*found.disputed])[0]
                unknown = ", and nobody can tell which of them is right" if self._third else ""
                raise ProtocolViolation(
                    f"{self._dispute(stage, first, found.disputed[first])}, found in step {step}{unknown}: memory or a "
                    "processor has failed, and the job must not go on with wrong weights; run.resume=true goes on at "
                    "the newest checkpoint"
                )
            for peer, block in found.wrong.items():
                how = "has changed since its update" if peer in found.changed else "is not that of the other holders"
                wrong[Worker(peer, stage)] = f"its copy of {self._block(stage, block)} {how}"
        return wrong

    def stands(self, stage: int, peers: Collection[int]) -> bool:
        """Nobody has come or gone since `share`: who had reduced gradients to hold by then still has."""
        return self._peers.get(stage) == set(peers)

    def share(
        self, stage: int, holds: Mapping[int, Holds], committed: int, mixed: bool = False, ahead: bool = False
    ) -> Shares:
        """Of a stage, from the reports of all its live workers, by pipeline. mixed: their weights are not all of one
        step. ahead: one of them has updated its blocks in the next step, and that stands; so they all have its
        gradients, nobody computes with the weights from before it, and those after it are sent in every generation.

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
            table = (
                placed(sizes, peers, self._copies, hosts)
                if began
                else refilled(held, sizes, peers, self._copies, hosts)
            )
            self._tables[stage], self._peers[stage] = table, set(peers)
        table = self._tables[stage]
        behind = mixed or (not ahead and any(of.weights < committed for of in holds.values()))
        knows = next((p for p in peers if holds[p].weights >= committed - 1), None)
        copies = missing(held, table, sizes)
        since, made = self._made.get(stage, (committed, set()))
        self._made[stage] = (
            committed,
            {(block, to) for block, _, to in copies} | (made if since == committed else set()),
        )
        return Shares(table, copies, knows if behind else None)

    def on_one_host(self) -> str | None:
        """Which stage a host would take blocks of with it, of several hosts, in words."""
        if len(set(self.hosts.values())) < 2:
            return None
        for stage, table in sorted(self._tables.items()):
            hosts = {peer: self.hosts.get((peer, stage), "") for peer in self._peers[stage]}
            if host := on_one_host(table, hosts):
                return (
                    f"all copies of some blocks of the optimizer's state of stage {stage} are on {host}: "
                    "if it is lost, the job goes back to its newest checkpoint"
                )
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

    def _dispute(self, stage: int, block: int, groups: list[list[int]]) -> str:
        """groups: who say the same, the largest last."""
        what = self._block(stage, block)
        if len(groups[-1]) == len(groups[-2]):
            all_of_them = [peer for group in groups for peer in group]
            return f"workers {self._workers(stage, all_of_them)} hold different copies of {what}"
        wrong, right = [peer for group in groups[:-1] for peer in group], groups[-1]
        verb = "worker {} holds" if len(wrong) == 1 else "workers {} hold"
        return f"{verb.format(self._workers(stage, wrong))} another copy of {what} than {self._workers(stage, right)}"

    def _block(self, stage: int, block: int) -> str:
        names = self.names.get(stage, [])
        name = f" ({names[block]})" if block < len(names) else ""
        return f"block {block} of the optimizer's state of stage {stage}{name}"

    def _workers(self, stage: int, peers: list[int]) -> str:
        hosts = {peer: self.hosts.get((peer, stage)) for peer in sorted(peers)}
        *most, last = (f"{peer}.{stage}" + (f" on {host}" if host else "") for peer, host in hosts.items())
        return f"{', '.join(most)} and {last}" if most else last


def _stages(workers: Iterable[Worker]) -> dict[int, list[Worker]]:
    found: dict[int, list[Worker]] = {}
    for worker in sorted(workers):
        found.setdefault(worker.stage, []).append(worker)
    return dict(sorted(found.items()))
