"""Computes which members hold each unit of a stage, as a table: unit -> its holders, beginning with the first holder.

    table = placed(sizes, peers, copies=2, hosts={0: "a", 1: "b"})    # at the start
    table = refilled(held, sizes, peers, copies=2, hosts)   # after deaths and returns; held: live holders, by unit
    lost(held)                                         # units without a holder
    missing(held, table, sizes)                        # copies to make: (unit, from, to)
    on_one_host(table, hosts)                          # a host whose loss would lose a unit, or None

Peers are the members that play the workers of one stage. `sizes` contains the number of elements of each unit. Tables
list the units in the stage's order. The first holder of a unit reduces the unit's gradient, sends the gradient to the
other holders, and sends the updated weights to all other peers.

At the start, peers form groups of `copies`, on different hosts if possible, and all copies of a unit are in one group
(copysets: Cidon et al., USENIX ATC 2013). So with two copies, two simultaneous deaths lose a unit only if they hit the
same group. A peer's load is the number of elements that it holds. Later, missing copies go to the peers with the least
load, and a returning peer takes copies from overloaded peers. Copies of a unit are placed on different hosts, unless
this would overload a peer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import accumulate

from recycle_pp.wire.messages.generations import Copy
from recycle_pp.wire.messages.members import Member
from recycle_pp.wire.messages.units import UnitId

Sizes = Mapping[UnitId, int]
Table = dict[UnitId, list[Member]]
SLACK = 0.04  # imbalances below this fraction of the mean load are not corrected


def placed(sizes: Sizes, peers: Collection[Member], copies: int, hosts: Mapping[Member, str] | None = None) -> Table:
    """The initial table. Neighbouring units have the same holders, and all peers hold about equally many elements.

    Each peer is the first holder of an equal share of the elements; the next peers in its group hold the copies. With
    copies=0, all peers hold all units, and all units have the same first holder.
    """
    if not copies:
        return dict.fromkeys(sizes, sorted(peers))
    holders = []
    for group in groups(peers, copies, hosts):
        holders += [[group[(k + j) % len(group)] for j in range(min(copies, len(group)))] for k in range(len(group))]
    total, ends = max(1, sum(sizes.values())), accumulate(sizes.values())
    middles = {unit: end - size / 2 for (unit, size), end in zip(sizes.items(), ends, strict=True)}
    return {
        unit: list(holders[min(int(middle * len(holders) / total), len(holders) - 1)])
        for unit, middle in middles.items()
    }


def groups(peers: Collection[Member], copies: int, hosts: Mapping[Member, str] | None = None) -> list[list[Member]]:
    """Divides peers into groups of `copies`. The peers of a group are on different hosts, unless one host has more
    peers than there are groups. Each leftover peer joins a different group."""
    hosts, count = hosts or {}, max(1, len(peers) // max(1, copies))
    of = {peer: hosts.get(peer, "") for peer in peers}
    names = list(of.values())
    # Neighbours in this list join different groups.
    dealt = sorted(peers, key=lambda peer: (-names.count(of[peer]), of[peer], peer))
    return [sorted(dealt[k::count]) for k in range(count)]


def refilled(
    held: Mapping[UnitId, Collection[Member]],
    sizes: Sizes,
    peers: Collection[Member],
    copies: int,
    hosts: Mapping[Member, str] | None = None,
) -> Table:
    """The table after deaths and returns. Makes few copies beyond the necessary ones.

    held: unit -> its live holders, at least one, in any order

    Gives missing copies to the peers with the least load, then moves copies from overloaded peers to peers whose load
    is far below the mean, then balances the first holders.
    """
    if not copies:
        return dict.fromkeys(sizes, sorted(peers))
    of = {peer: (hosts or {}).get(peer, "") for peer in peers}
    wanted = min(copies, len(peers))
    table = {unit: list(held[unit])[: max(wanted, 1)] for unit in sizes}
    load = {peer: 0 for peer in peers}
    for unit, holders in table.items():
        for peer in holders:
            load[peer] += sizes[unit]
    mean = wanted * sum(sizes.values()) / len(load)
    slack = max(SLACK * mean, copies * max(sizes.values(), default=0))
    for unit, holders in table.items():
        size = sizes[unit]
        while len(holders) < wanted:
            taken, room = {of[holder] for holder in holders}, mean + slack - size
            others = [p for p in load if p not in holders]
            apart = [p for p in others if of[p] not in taken and load[p] <= room]
            peer = min(apart or others, key=lambda p: (load[p], p))
            holders.append(peer)
            load[peer] += size
    for peer in sorted(load, key=lambda p: (load[p], p)):
        if load[peer] < mean - slack:
            for gain in (1, 0):  # first move units that gain a host, then units that stay on as many hosts
                _take_share(peer, table, sizes, load, mean, of, gain)
    _balance_first(table, sizes, len(load), slack)
    return table


def on_one_host(table: Table, hosts: Mapping[Member, str]) -> str | None:
    """A host that has all copies of a unit with more than one copy; None if there is no such host."""
    return next((hosts[of[0]] for of in table.values() if len(of) > 1 and len({hosts[peer] for peer in of}) == 1), None)


def lost(held: Mapping[UnitId, Collection[Member]]) -> list[UnitId]:
    """The units without a holder."""
    return [unit for unit, holders in held.items() if not holders]


def missing(held: Mapping[UnitId, Collection[Member]], table: Table, sizes: Sizes) -> list[Copy]:
    """The copies to make, as (unit, from, to), in the order of the units. Each copy comes from the holder that has the
    fewest elements to send so far."""
    sent: dict[int, int] = {}
    found = []
    for unit, holders in table.items():
        for to in holders:
            if to not in held[unit]:
                source = min(held[unit], key=lambda peer: (sent.get(peer, 0), peer))
                sent[source] = sent.get(source, 0) + sizes[unit]
                found.append((unit, source, to))
    return found


def _take_share(
    peer: int,
    table: Table,
    sizes: Sizes,
    load: dict[int, int],
    mean: float,
    hosts: Mapping[int, str],
    gain: int,
) -> None:
    """Moves units to `peer` until its load reaches the mean. Moves only units that are then on `gain` more hosts."""
    for unit, holders in table.items():
        size = sizes[unit]
        if load[peer] >= mean:
            return
        if peer in holders:
            continue
        most = max(holders, key=lambda p: (load[p], -p))
        rest = {hosts[holder] for holder in holders if holder != most}
        gained = (hosts[peer] not in rest) - (hosts[most] not in rest)
        if gained == gain and load[most] > mean and load[most] - load[peer] > size:
            holders[holders.index(most)] = peer
            load[most] -= size
            load[peer] += size


def _balance_first(table: Table, sizes: Sizes, peers: int, slack: float) -> None:
    """Swaps overloaded first holders with the least loaded holder of the same unit, in place. Here a member's load
    counts only units of which it is the first holder. peers: number of peers."""
    load: dict[int, int] = {}
    for unit, holders in table.items():
        load[holders[0]] = load.get(holders[0], 0) + sizes[unit]
    mean = sum(sizes.values()) / peers
    for unit, holders in table.items():
        size = sizes[unit]
        least = min(holders, key=lambda p: (load.get(p, 0), p))
        if load[holders[0]] > mean + slack / 2 and load[holders[0]] - load.get(least, 0) > size:
            load[holders[0]] -= size
            load[least] = load.get(least, 0) + size
            k = holders.index(least)
            holders[0], holders[k] = holders[k], holders[0]
