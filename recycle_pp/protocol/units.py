"""The coordinator's tables of units: the layers of each stage, and the holders of each unit of these layers.

    units = Units(copies=2)                           # 0: all workers hold all units
    units.describe(worker, host, {3: [("layers.3.norm", 512)]})         # worker has built these layers
    units.layout                                      # the layers of every stage
    void = units.void(reports, records)               # stages that must sum their gradients again
    shares = units.share_out(reports, committed)      # stage -> new holders; raises StageLost
    gives = units.sources(joiner, live)               # donor -> units that a joiner should follow
    wrong = units.compare(votes, step)                # workers with wrong copies; raises ProtocolViolation

Like the ledger, the table follows from the reports of live workers: a worker holds the units that it reports in their
state after the newest committed step. So copying may be interrupted at any point, and a new coordinator needs no
history.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import groupby

from msgspec import structs
from recycle_schedules import Worker

from recycle_pp.wire.messages.generations import Holds, Report, Shares
from recycle_pp.wire.messages.steps import Vote
from recycle_pp.wire.messages.units import Layout, UnitId, length, unpacked

from .commit import ProtocolViolation
from .holders import Sizes, Table, lost, missing, on_one_host, placed, refilled
from .ledger import Record
from .mismatch import compare
from .stage_lost import StageLost


class Units:
    """
    layout  stage -> its layers, in order
    hosts   (pipeline, stage) -> the worker's host
    Both start empty and are filled by `describe`.
    """

    def __init__(self, copies: int, third: bool = False) -> None:
        """copies: number of copies of each unit; 0: one for each worker of the stage
        third: continue without the holder of a wrong copy, if it is known which copy is wrong (control.mismatch)"""
        self.layout: Layout = {}
        self.hosts: dict[tuple[int, int], str] = {}
        self._copies, self._third = copies, third
        self._described: dict[int, list[tuple[str, int]]] = {}  # layer -> (name, number of elements) of its units
        self._sizes: dict[int, Sizes] = {}  # stage -> number of elements of each unit; cached
        self._tables: dict[int, Table] = {}
        self._peers: dict[int, set[int]] = {}
        self._planned: dict[int, Table] = {}  # tables that include the followers
        self._followers: dict[int, set[int]] = {}  # joiners that follow their units
        self._made: dict[int, tuple[int, set[tuple[UnitId, int]]]] = {}  # (step, (unit, to) of copies since its commit)

    def describe(self, worker: Worker, host: str, layers: Mapping[int, list[tuple[str, int]]]) -> None:
        """Records that a worker has built the layers of its stage on `host`.

        layers: layer -> (name, number of elements) of each of its units; the layers in the order of the stage"""
        self.hosts[worker] = host
        self.layout.setdefault(worker.stage, [*layers])
        self._described |= layers
        self._sizes.clear()

    def void(self, reports: Mapping[Worker, Report], records: Mapping[Worker, Record]) -> set[int]:
        """The stages whose reduced gradients are void, by the reports of all live workers. Call before `share_out`.

        With copies=0 every worker has all reduced gradients of its stage. One survivor is then enough, because it can
        send copies, and no stage is void. Otherwise each holder has the reduced gradients of its own units only. If a
        holder has died or lacks them, the whole stage sums again, from the accumulators that all workers keep until the
        commit. Marks the `records` of such a stage as not reduced.
        """
        found: set[int] = set()
        if not self._copies:
            return found
        for stage, peers in _stages(reports).items():
            if not self.stands(stage, [w.pipeline for w in peers]) or not all(records[w].reduced for w in peers):
                found |= {stage for w in peers if records[w].reduced}
                for worker in peers:
                    records[worker].reduced = False
        return found

    def share_out(self, reports: Mapping[Worker, Report], committed: int, took_back: bool = False) -> dict[int, Shares]:
        """The new shares of every stage. took_back: updates of the uncommitted step are undone, so weights sent after
        them are void."""
        shares = {}
        for stage, peers in _stages(reports).items():
            holds = {w.pipeline: reports[w].holds for w in peers}
            ahead = any(reports[w].ahead for w in peers)
            shares[stage] = self.share(stage, holds, committed, took_back and ahead, ahead and not took_back)
        return {stage: structs.replace(of, elsewhere=self._elsewhere(stage)) for stage, of in shares.items()}

    def compare(self, votes: Mapping[Worker, Vote], step: int) -> dict[Worker, str]:
        """Workers with a wrong copy of a unit, each with a description of the unit.

        votes: votes of all live workers; nothing is compared with copies=0, when they have no checksums

        Raises ProtocolViolation if it is unknown which copy is wrong, or if the job must not continue without its
        holder.
        """
        wrong: dict[Worker, str] = {}
        for stage in _stages(votes) if self._copies else ():
            of = {worker.pipeline: vote for worker, vote in votes.items() if worker.stage == stage}
            found = compare(self._tables[stage], of, self._made[stage][1])
            if found is None:
                continue
            if found.unclear or not self._third:
                first = (found.unclear or [*found.disputed])[0]
                unknown = ", and it is unknown which one is right" if self._third else ""
                raise ProtocolViolation(
                    f"{self._dispute(stage, first, found.disputed[first])}, found in step {step}{unknown}: memory or a "
                    "processor has failed, and the job must not continue with wrong weights; run.resume=true continues "
                    "from the newest checkpoint"
                )
            for peer, unit in found.wrong.items():
                how = (
                    "has changed since its update"
                    if peer in found.changed
                    else "differs from the other holders' copies"
                )
                wrong[Worker(peer, stage)] = f"its copy of {self._unit(unit)} {how}"
        return wrong

    def stands(self, stage: int, peers: Collection[int]) -> bool:
        """Whether the stage has the same workers as at the last `share`."""
        return self._peers.get(stage) == set(peers)

    def share(
        self, stage: int, holds: Mapping[int, Holds], committed: int, mixed: bool = False, ahead: bool = False
    ) -> Shares:
        """The new shares of a stage. Existing copies are used as long as the table needs them.

        holds: pipeline -> reported state, for all live workers of the stage; a worker that holds a unit has all
            exponents of the fixed-point sums
        mixed: these workers may have weights of different steps
        ahead: a worker has applied the next step to its units, and this update stays. Then all workers have the
            gradients of that step, no micro-batch needs the older weights, and every generation sends the newer weights

        Raises StageLost if a unit has no holder.
        """
        sizes, peers = self._sizes_of(stage), sorted(holds)
        complete = {p for p, of in holds.items() if of.loaded == committed or length(of.units) == len(sizes)}
        held = self._held(stage, holds, complete)
        if gone := lost(held):
            raise StageLost(stage, f"no copy left of {len(gone)} of its {len(sizes)} units")
        if not self.stands(stage, peers):
            new = set(peers) - self._peers.get(stage, set(peers))
            hosts = {p: self.hosts.get((p, stage), "") for p in peers}
            if len(complete) == len(peers) and not any(of.units for of in holds.values()):
                table = placed(sizes, peers, self._copies, hosts)
            else:
                table = refilled(held, sizes, peers, self._copies, hosts)
            self._tables[stage], self._peers[stage] = table, set(peers)
            self._followers[stage] = self._followers.get(stage, set()) - {*peers}
            followed = {(unit, peer) for peer in new for unit in unpacked(holds[peer].units)}
        else:
            table, followed = self._tables[stage], set()
        lacking = [of for p, of in holds.items() if p not in complete]
        behind = any(mixed or (not ahead and of.weights < committed) for of in lacking)
        knows = next((p for p in peers if holds[p].weights >= committed - 1), None)
        copies = missing(held, table, sizes) if lacking else []
        since, made = self._made.get(stage, (committed, set()))
        made = (made if since == committed else set()) | {(unit, to) for unit, _, to in copies} | followed
        self._made[stage] = committed, made
        return Shares.of(table, not self._copies, copies, knows if behind else None)

    def sources(
        self, joiner: Worker, live: Collection[Worker], serving: Mapping[int, int]
    ) -> dict[Worker, list[UnitId]]:
        """donor -> units that the joiner must follow, so that it can hold its share as a member. Empty if the table is
        unknown, or if a unit has no live holder. serving: pipeline -> number of joiners to which it sends units."""
        stage, sizes = joiner.stage, self._sizes_of(joiner.stage)
        peers = {w.pipeline for w in live if w.stage == stage}
        held = _among(peers, self._tables.get(stage, {}))
        if not held or lost(held):
            return {}
        if not self._copies:
            donor = min(peers, key=lambda p: (serving.get(p, 0), p))
            return {Worker(donor, stage): [*held]}
        followers = self._followers.setdefault(stage, set())
        before = _among(peers | followers, self._planned.get(stage, {})) if followers else {}
        followers.add(joiner.pipeline)
        hosts = {p: self.hosts.get((p, stage), "") for p in peers | followers}
        start = before if before and not lost(before) else held
        table = self._planned[stage] = refilled(start, sizes, [*hosts], self._copies, hosts)
        wanted = _among({joiner.pipeline}, table)
        if not any(wanted.values()):
            wanted[next(iter(wanted))] = [joiner.pipeline]  # at least one unit, to follow the job's steps
        found: dict[Worker, list[UnitId]] = {}
        for unit, source, _ in missing(held, wanted, sizes):
            found.setdefault(Worker(source, stage), []).append(unit)
        return found

    def died(self, joiner: Worker) -> None:
        """Removes a joiner. Other joiners keep their units; later joiners take the units of the removed one."""
        self._followers.get(joiner.stage, set()).discard(joiner.pipeline)

    def give(self, gives: Mapping[Worker, Collection[UnitId]]) -> bool:
        """Whether all donors still hold the units that they send."""
        tables = self._tables
        return all(w.pipeline in tables[w.stage][unit] for w, units in gives.items() for unit in units)

    def savers(self, live: Collection[Worker]) -> list[Worker]:
        """The workers that save a checkpoint: the first live holder of each unit."""
        found = set()
        for stage in _stages(live):
            peers = {w.pipeline for w in live if w.stage == stage}
            for holders, _ in groupby(self._tables[stage].values()):
                found.add(Worker(next(p for p in holders if p in peers), stage))
        return sorted(found)

    def leavers(self, leaving: Collection[Worker], live: Collection[Worker]) -> set[Worker]:
        """The leaving workers that can leave now, because a peer and a copy of each of their units stay."""
        stay = {w.stage for w in live if w not in leaving}
        gone: set[Worker] = set()
        for worker in sorted(leaving, reverse=True):
            peers = {w.pipeline for w in {*live} - gone - {worker} if w.stage == worker.stage}
            runs = [holders for holders, _ in groupby(self._tables.get(worker.stage, {}).values())]
            kept = all(peers.intersection(holders) for holders in runs)
            if worker in live and worker.stage in stay and kept:
                gone.add(worker)
        return gone

    @property
    def complete(self) -> bool:
        """Whether every worker holds all units of its stage."""
        return all(
            len(of) == len(self._peers[k])
            for k, of_stage in self._tables.items()
            for of, _ in groupby(of_stage.values())
        )

    def on_one_host(self) -> str | None:
        """A warning if one of several hosts has all copies of some units; else None."""
        if len(set(self.hosts.values())) < 2:
            return None
        for stage, table in sorted(self._tables.items()):
            hosts = {peer: self.hosts.get((peer, stage), "") for peer in self._peers[stage]}
            if host := on_one_host(table, hosts):
                return (
                    f"all copies of some units of the state of stage {stage} are on {host}: "
                    "if this host is lost, the job restarts from its newest checkpoint"
                )
        return None

    def _sizes_of(self, stage: int) -> Sizes:
        """The number of elements of each unit of a stage, in the stage's order."""
        if stage not in self._sizes:
            self._sizes[stage] = {
                UnitId(layer, number): size
                for layer in self.layout.get(stage, [])
                for number, (_, size) in enumerate(self._described[layer])
            }
        return self._sizes[stage]

    def _held(self, stage: int, holds: Mapping[int, Holds], complete: Collection[int]) -> Table:
        """The live holders of each unit; planned and previous holders first."""
        if len(complete) == len(holds) and not self._copies:
            return dict.fromkeys(self._sizes_of(stage), sorted(holds))
        units = {p: set(unpacked(of.units)) for p, of in holds.items()}
        planned, before = self._planned.get(stage, {}), self._tables.get(stage, {})
        found: Table = {}
        for unit in self._sizes_of(stage):
            order = dict.fromkeys([*planned.get(unit, ()), *before.get(unit, ()), *sorted(units)])
            found[unit] = [p for p in order if p in units and (p in complete or unit in units[p])]
        return found

    def _elsewhere(self, stage: int) -> list[tuple[UnitId, int, list[int]]]:
        """See `Shares.elsewhere`."""
        found = []
        for layer in self.layout.get(stage, []):
            for other, table in self._tables.items():
                if other != stage and layer in self.layout[other]:
                    units = [unit for unit in table if unit.layer == layer]
                    found += [(unit, other, table[unit][: 1 if self._copies else None]) for unit in units]
        return found

    def _dispute(self, stage: int, unit: UnitId, groups: list[list[int]]) -> str:
        """A sentence about a disputed unit. groups: workers with the same checksum, the largest last."""
        what = self._unit(unit)
        if len(groups[-1]) == len(groups[-2]):
            all_of_them = [peer for group in groups for peer in group]
            return f"workers {self._workers(stage, all_of_them)} hold different copies of {what}"
        wrong, right = [peer for group in groups[:-1] for peer in group], groups[-1]
        verb = "worker {} holds" if len(wrong) == 1 else "workers {} hold"
        return (
            f"{verb.format(self._workers(stage, wrong))} a different copy of {what} than {self._workers(stage, right)}"
        )

    def _unit(self, unit: UnitId) -> str:
        name, _ = self._described[unit.layer][unit.number]
        return f"unit {unit.number} of layer {unit.layer} ({name})"

    def _workers(self, stage: int, peers: list[int]) -> str:
        hosts = {peer: self.hosts.get((peer, stage)) for peer in sorted(peers)}
        *most, last = (f"{peer}.{stage}" + (f" on {host}" if host else "") for peer, host in hosts.items())
        return f"{', '.join(most)} and {last}" if most else last


def _among(peers: Collection[int], table: Table) -> Table:
    """The table without other workers."""
    return {unit: [peer for peer in holders if peer in peers] for unit, holders in table.items()}


def _stages(workers: Iterable[Worker]) -> dict[int, list[Worker]]:
    found: dict[int, list[Worker]] = {}
    for worker in sorted(workers):
        found.setdefault(worker.stage, []).append(worker)
    return dict(sorted(found.items()))
