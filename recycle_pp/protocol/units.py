"""The coordinator's tables of units: the layers of each stage, and the holders of each unit.

    units = Units(copies=2)                           # 0: every worker holds all units of its stage
    units.describe(member, stage, host, {3: [("layers.3.norm", 512)]})  # the member has built these layers
    units.layout                                      # the layers of every stage
    void = units.void(live, records)         # stages that must sum their gradients again
    shares = units.share_out(live, reports, committed)       # stage -> new holders; raises StageLost
    gives = units.sources(joiner, stage, live, serving)      # donor -> units to send to a joiner
    gives = units.whole(stage, live, serving)                # the same for an understudy
    gives = units.moved(receiver, layers, live, serving)     # the same for a member whose stage will gain layers
    units.relayout(layout, live)             # from the next `share_out` on, the stages have these layers
    wrong = units.compare(live, votes, step)          # members with wrong copies; raises ProtocolViolation

Holders are members. `live` is always the assignment of all live members: member -> the worker that it plays.

Like the ledger, the tables depend only on the reports of live members. A report lists the units that a member holds in
their state after the newest committed step. So copying may be interrupted at any point, and a new coordinator needs no
history.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import groupby

from msgspec import structs

from recycle_pp.wire.messages.generations import Holds, Report, Shares
from recycle_pp.wire.messages.members import Assignment, Member
from recycle_pp.wire.messages.steps import Vote
from recycle_pp.wire.messages.units import Layout, UnitId, length, unpacked

from .ballot import ProtocolViolation
from .holders import Sizes, Table, lost, missing, on_one_host, placed, refilled
from .ledger import Record
from .mismatch import compare
from .stage_lost import StageLost


class Units:
    """The layers of each stage, and the holders of their units.

    layout  stage -> its layers, in order
    hosts   member -> its host
    Both start empty and are filled by `describe`.
    """

    def __init__(self, copies: int, third: bool = False) -> None:
        """
        copies  number of copies of each unit; 0: one for each worker of the stage
        third   whether to continue without the holder of a wrong copy, if it is known which copy is wrong
                (control.mismatch)
        """
        self.layout: Layout = {}
        self.hosts: dict[Member, str] = {}
        self._copies, self._third = copies, third
        self.sharded = copies > 0
        self._described: dict[int, list[tuple[str, int]]] = {}  # layer -> (name, number of elements) of its units
        self._sizes: dict[int, Sizes] = {}  # stage -> number of elements of each unit; cached
        self._tables: dict[int, Table] = {}
        self._peers: dict[int, set[Member]] = {}
        self._planned: dict[int, Table] = {}  # stage -> its table once the joiners have joined or a move has ended
        self._followers: dict[int, set[Member]] = {}  # stage -> joiners that follow their units
        # stage -> (newest committed step, copies made since its commit)
        self._made: dict[int, tuple[int, set[tuple[UnitId, Member]]]] = {}

    def describe(self, member: Member, stage: int, host: str, layers: Mapping[int, list[tuple[str, int]]]) -> None:
        """Records that a member on `host` has built the layers of a stage.

        layers: layer -> (name, number of elements) of each of its units; the layers in the order of the stage"""
        self.hosts[member] = host
        self.layout.setdefault(stage, [*layers])
        self._described |= layers
        self._sizes.clear()

    def relayout(self, layout: Layout, live: Assignment) -> list[int]:
        """Changes the layers of some stages, and returns these stages. The next `share_out` rebuilds their tables."""
        changed = [stage for stage, layers in layout.items() if layers != self.layout[stage]]
        self._planned |= {stage: self._future(stage, layout[stage], live) for stage in changed}
        self.layout = dict(layout)
        self._sizes.clear()
        return changed

    def elements(self, stage: int) -> int:
        return sum(self._sizes_of(stage).values())

    def void(self, live: Assignment, records: Mapping[Member, Record]) -> set[int]:
        """The stages whose reduced gradients are void, from the records of all live members. Call before `share_out`.

        With copies=0 every member has all reduced gradients of its stage. Any survivor can send copies of them, so no
        stage is void. Otherwise each holder has only the reduced gradients of its own units. If a holder has died or
        lacks them, the whole stage sums again, from the accumulators that all workers keep until the commit. The
        `records` of such a stage are changed to not reduced.
        """
        found: set[int] = set()
        if not self._copies:
            return found
        for stage, peers in _stages(live).items():
            if not self.unchanged(stage, peers) or not all(records[peer].reduced for peer in peers):
                found |= {stage for peer in peers if records[peer].reduced}
                for peer in peers:
                    records[peer].reduced = False
        return found

    def share_out(
        self, live: Assignment, reports: Mapping[Member, Report], committed: int, took_back: bool = False
    ) -> dict[int, Shares]:
        """stage -> its new shares. Raises StageLost if a unit has no holder.

        took_back: whether updates of the uncommitted step are rolled back; weights sent after such an update are then
            void
        """
        shares = {}
        for stage, peers in _stages(live).items():
            holds = {peer: reports[peer].holds for peer in peers}
            ahead = any(reports[peer].ahead for peer in peers)
            shares[stage] = self.share(stage, holds, committed, took_back and ahead, ahead and not took_back)
        return {stage: structs.replace(of, elsewhere=self._elsewhere(stage)) for stage, of in shares.items()}

    def compare(self, live: Assignment, votes: Mapping[Member, Vote], step: int) -> dict[Member, str]:
        """Members with a wrong copy of a unit, each with a description of the unit.

        votes: votes of all live members. With copies=0 they have no checksums, and nothing is compared

        Raises ProtocolViolation if it is unknown which copy is wrong, or if the job must not continue without its
        holder.
        """
        wrong: dict[Member, str] = {}
        for stage, peers in _stages(live).items() if self._copies else ():
            found = compare(self._tables[stage], {peer: votes[peer] for peer in peers}, self._made[stage][1])
            if found is None:
                continue
            if found.unclear or not self._third:
                first = (found.unclear or [*found.disputed])[0]
                unknown = ", and it is unknown which one is right" if self._third else ""
                raise ProtocolViolation(
                    f"{self._dispute(live, first, found.disputed[first])}, found in step {step}{unknown}. This is "
                    "probably a hardware fault, and the job must not continue with wrong weights; run.resume=true "
                    "continues from the newest checkpoint"
                )
            for peer, unit in found.wrong.items():
                how = (
                    "has changed since its update"
                    if peer in found.changed
                    else "differs from the other holders' copies"
                )
                wrong[peer] = f"its copy of {self._unit(unit)} {how}"
        return wrong

    def unchanged(self, stage: int, peers: Collection[Member]) -> bool:
        """Whether the stage has the same members and units as at the last `share`."""
        same = self._peers.get(stage) == set(peers)
        return same and self._tables[stage].keys() == self._sizes_of(stage).keys()

    def share(
        self, stage: int, holds: Mapping[Member, Holds], committed: int, mixed: bool = False, ahead: bool = False
    ) -> Shares:
        """The new shares of a stage. Keeps existing copies that the table needs.

        holds: live member of the stage -> its reported state; a member that holds any unit also has all exponents of
            the fixed-point sums
        mixed: whether the members may have weights of different steps
        ahead: whether a member has applied the step after `committed`, and keeps this update. If so, all members have
            the gradients of that step. So no micro-batch needs weights from before it, and each generation sends newer
            weights

        Raises StageLost if a unit has no holder.
        """
        sizes, peers = self._sizes_of(stage), sorted(holds)
        complete = {p for p, of in holds.items() if of.loaded == committed or length(of.units) == len(sizes)}
        held = self._held(stage, holds, complete)
        if gone := lost(held):
            raise StageLost(stage, f"lost all copies of {len(gone)} of its {len(sizes)} units")
        if not self.unchanged(stage, peers):
            new, before = set(peers) - self._peers.get(stage, set(peers)), self._tables.get(stage, dict(held))
            hosts = {p: self.hosts.get(p, "") for p in peers}
            if len(complete) == len(peers) and not any(of.units for of in holds.values()):
                table = placed(sizes, peers, self._copies, hosts)
            else:
                table = refilled(held, sizes, peers, self._copies, hosts)
            self._tables[stage], self._peers[stage] = table, set(peers)
            self._followers[stage] = self._followers.get(stage, set()) - {*peers}
            # `followed` stays empty unless state is sharded, because only then do votes compare copies.
            has = ((unit, peer) for peer in (peers if self._copies else ()) for unit in unpacked(holds[peer].units))
            followed = {(unit, peer) for unit, peer in has if peer in new or unit not in before}
        else:
            table, followed = self._tables[stage], set()
        lacking = [of for p, of in holds.items() if p not in complete]
        behind = any(mixed or (not ahead and of.weights < committed) for of in lacking)
        # A member with all units has the newest exponents, although its `weights` may be two steps behind after two
        # generations in two steps.
        knows = next((p for p in peers if p in complete or holds[p].weights >= committed - 1), None)
        copies = missing(held, table, sizes) if lacking else []
        since, made = self._made.get(stage, (committed, set()))
        made = (made if since == committed else set()) | {(unit, to) for unit, _, to in copies} | followed
        self._made[stage] = committed, made
        return Shares.of(table, not self._copies, copies, knows if behind else None)

    def sources(
        self, joiner: Member, stage: int, live: Assignment, serving: Mapping[Member, int]
    ) -> dict[Member, list[UnitId]]:
        """donor -> units that the joiner must receive and follow, to hold its share of the stage. Empty if the table is
        unknown, or if a unit has no live holder. serving: donor -> number of joiners to which it sends units."""
        sizes, peers = self._sizes_of(stage), {m for m, worker in live.items() if worker.stage == stage}
        held = _among(peers, self._tables.get(stage, {}))
        if not held or lost(held):
            return {}
        if not self._copies:
            return self.whole(stage, live, serving)
        followers = self._followers.setdefault(stage, set())
        before = _among(peers | followers, self._planned.get(stage, {})) if followers else {}
        followers.add(joiner)
        hosts = {p: self.hosts.get(p, "") for p in peers | followers}
        start = before if before and not lost(before) else held
        table = self._planned[stage] = refilled(start, sizes, [*hosts], self._copies, hosts)
        wanted = _among({joiner}, table)
        if not any(wanted.values()):
            wanted[next(iter(wanted))] = [joiner]  # at least one unit, to follow the job's steps
        found: dict[Member, list[UnitId]] = {}
        for unit, source, _ in missing(held, wanted, sizes):
            found.setdefault(source, []).append(unit)
        return found

    def whole(self, stage: int, live: Assignment, serving: Mapping[Member, int]) -> dict[Member, list[UnitId]]:
        """donor -> all units of the stage. The donor is one member that holds all of them. Empty if the table is
        unknown, or if there is no such member. serving: see `sources`."""
        held = _among(_stages(live).get(stage, []), self._tables.get(stage, {}))
        donors = set.intersection(*map(set, held.values())) if held else set()
        return {min(donors, key=lambda p: (serving.get(p, 0), p)): [*held]} if donors else {}

    def moved(
        self, receiver: Member, layers: list[int], live: Assignment, serving: Mapping[Member, int]
    ) -> dict[Member, list[UnitId]]:
        """donor -> units that `receiver` must follow, so that it can hold its share when its stage has these `layers`.
        Empty if a unit has no live holder. serving: donor -> number of members to which it sends units.

        The new copies of a unit come from different holders, so that the next vote detects a wrong copy."""
        stage = live[receiver].stage
        gained = {layer for layer in layers if layer not in self.layout[stage]}
        held = {unit: of for table in self._tables.values() for unit, of in table.items() if unit.layer in gained}
        held = _among(live, held)
        if lost(held):
            return {}
        if not self._copies:
            held = {unit: [min(of, key=lambda p: (serving.get(p, 0), p))] for unit, of in held.items()}
        future = self._future(stage, layers, live).items()
        copy = {unit: of.index(receiver) for unit, of in future if unit.layer in gained and receiver in of}
        for layer in sorted(gained - {unit.layer for unit in copy}):  # any unit brings the exponents of its layer
            copy[UnitId(layer, 0)] = 0
        found: dict[Member, list[UnitId]] = {}
        for unit, k in copy.items():
            found.setdefault(held[unit][k % len(held[unit])], []).append(unit)
        return found

    def died(self, joiner: Member) -> None:
        """Removes a dead joiner. Other joiners keep the units planned for them; later joiners can get its units."""
        for followers in self._followers.values():
            followers.discard(joiner)

    def give(self, gives: Mapping[Member, Collection[UnitId]]) -> bool:
        """Whether all donors still hold the units that they send. gives: donor -> these units."""
        tables = self._tables.values()
        return all(
            any(donor in table.get(unit, ()) for table in tables) for donor, units in gives.items() for unit in units
        )

    def savers(self, live: Assignment) -> list[Member]:
        """The members that save a checkpoint: the first live holder of each unit."""
        found = set()
        for stage in _stages(live):
            for holders, _ in groupby(self._tables[stage].values()):
                found.add(next(holder for holder in holders if holder in live))
        return sorted(found)

    def leavers(self, leaving: Collection[Member], live: Assignment) -> set[Member]:
        """The leaving members that can leave now, because a peer and a copy of each of their units remain."""
        stay = {worker.stage for member, worker in live.items() if member not in leaving}
        gone: set[Member] = set()
        for member in sorted(live.keys() & leaving, reverse=True):
            stage = live[member].stage
            peers = {peer for peer, worker in live.items() if worker.stage == stage} - gone - {member}
            runs = [holders for holders, _ in groupby(self._tables.get(stage, {}).values())]
            if stage in stay and all(peers.intersection(holders) for holders in runs):
                gone.add(member)
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
            hosts = {peer: self.hosts.get(peer, "") for peer in self._peers[stage]}
            if host := on_one_host(table, hosts):
                return (
                    f"all copies of some units of the state of stage {stage} are on {host}: "
                    "if this host is lost, the job restarts from its newest checkpoint"
                )
        return None

    def _future(self, stage: int, layers: list[int], live: Assignment) -> Table:
        """The table that the stage would have with these layers and its current members."""
        peers = [member for member, worker in live.items() if worker.stage == stage]
        sizes, held = self._sizes_in(layers), _among(peers, self._tables[stage])
        hosts = {p: self.hosts.get(p, "") for p in peers}
        return refilled({unit: held.get(unit, []) for unit in sizes}, sizes, peers, self._copies, hosts)

    def _sizes_of(self, stage: int) -> Sizes:
        """The number of elements of each unit of a stage, in the stage's order."""
        if stage not in self._sizes:
            self._sizes[stage] = self._sizes_in(self.layout.get(stage, []))
        return self._sizes[stage]

    def _sizes_in(self, layers: list[int]) -> Sizes:
        return {UnitId(layer, n): size for layer in layers for n, (_, size) in enumerate(self._described[layer])}

    def _held(self, stage: int, holds: Mapping[Member, Holds], complete: Collection[Member]) -> Table:
        """unit -> its live holders. Holders in the planned table come first, then those in the current table, then
        others."""
        if len(complete) == len(holds) and not self._copies:
            return dict.fromkeys(self._sizes_of(stage), sorted(holds))
        units = {p: set(unpacked(of.units)) for p, of in holds.items()}
        planned, before = self._planned.get(stage, {}), self._tables.get(stage, {})
        found: Table = {}
        for unit in self._sizes_of(stage):
            order = dict.fromkeys([*planned.get(unit, ()), *before.get(unit, ()), *sorted(units)])
            found[unit] = [p for p in order if p in units and (p in complete or unit in units[p])]
        return found

    def _elsewhere(self, stage: int) -> list[tuple[UnitId, int, list[Member]]]:
        """See `Shares.elsewhere`."""
        found = []
        for layer in self.layout.get(stage, []):
            for other, table in self._tables.items():
                if other != stage and layer in self.layout[other]:
                    units = [unit for unit in table if unit.layer == layer]
                    found += [(unit, other, table[unit][: 1 if self._copies else None]) for unit in units]
        return found

    def _dispute(self, live: Assignment, unit: UnitId, groups: list[list[Member]]) -> str:
        """A sentence about a disputed unit. groups: members with the same checksum, the largest last."""
        what = self._unit(unit)
        if len(groups[-1]) == len(groups[-2]):
            all_of_them = [peer for group in groups for peer in group]
            return f"workers {self._workers(live, all_of_them)} hold different copies of {what}"
        wrong, right = [peer for group in groups[:-1] for peer in group], groups[-1]
        verb = "worker {} holds" if len(wrong) == 1 else "workers {} hold"
        return f"{verb.format(self._workers(live, wrong))} a different copy of {what} than {self._workers(live, right)}"

    def _unit(self, unit: UnitId) -> str:
        name, _ = self._described[unit.layer][unit.number]
        return f"unit {unit.number} of layer {unit.layer} ({name})"

    def _workers(self, live: Assignment, peers: list[Member]) -> str:
        hosts = {peer: self.hosts.get(peer) for peer in sorted(peers)}
        *most, last = (f"{live[peer]}" + (f" on {host}" if host else "") for peer, host in hosts.items())
        return f"{', '.join(most)} and {last}" if most else last


def _among(peers: Collection[Member], table: Table) -> Table:
    """The table restricted to `peers`."""
    return {unit: [peer for peer in holders if peer in peers] for unit, holders in table.items()}


def _stages(live: Assignment) -> dict[int, list[Member]]:
    """stage -> its live members, ascending."""
    found: dict[int, list[Member]] = {}
    for member, worker in sorted(live.items()):
        found.setdefault(worker.stage, []).append(member)
    return dict(sorted(found.items()))
