"""Each block has k live holders if k workers are alive.

Loads stay equal, few blocks move, and k - 1 deaths between two heals lose nothing.
"""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle_pp.protocol.holders import groups, lost, missing, on_one_host, placed, refilled
from recycle_pp.wire.messages.units import UnitId

SIZES = st.lists(st.integers(1, 1 << 14), min_size=1, max_size=80).map(lambda sizes: of_sizes([128 * n for n in sizes]))
PEERS = st.sets(st.integers(0, 15), min_size=1, max_size=12)


def of_sizes(sizes):
    """Blocks of these sizes, of one layer."""
    return {UnitId(0, number): size for number, size in enumerate(sizes)}


def load(table, sizes):
    found = Counter()
    for block, holders in table.items():
        for peer in holders:
            found[peer] += sizes[block]
    return found


def living(table, live):
    return {block: [peer for peer in holders if peer in live] for block, holders in table.items()}


def assert_held(table, sizes, live, copies):
    assert [*table] == [*sizes]
    for holders in table.values():
        assert len(holders) == len(set(holders)) == min(copies, len(live))
        assert set(holders) <= live


@given(SIZES, PEERS, st.integers(1, 4))
def test_at_the_start_every_block_has_k_holders_and_all_peers_the_same_load(sizes, peers, copies):
    table = placed(sizes, peers, copies)
    assert_held(table, sizes, peers, copies)
    k = min(copies, len(peers))
    share = k * sum(sizes.values()) / len(peers)
    assert all(abs(load(table, sizes)[peer] - share) <= k * max(sizes.values()) for peer in peers)


@given(PEERS, st.integers(1, 4))
def test_groups_have_k_members_and_leftover_peers_join_one_each(peers, copies):
    found = groups(peers, copies)
    assert sorted(peer for group in found for peer in group) == sorted(peers)
    assert len(found) == max(1, len(peers) // copies)
    assert max(map(len, found)) - min(map(len, found)) <= 1


@given(st.integers(2, 4), st.integers(1, 4), st.integers(1, 3))
def test_a_group_is_on_different_hosts_if_enough_hosts_have_enough_peers(copies, more, each):
    count = copies * more
    hosts = {peer: f"host-{peer // each}" for peer in range(count * each)}  # neighbours share a host
    for group in groups(list(hosts), copies, hosts):
        assert len({hosts[peer] for peer in group}) == len(group)


@given(st.data(), SIZES, PEERS, st.integers(1, 4))
def test_each_block_has_k_holders_and_k_minus_1_deaths_between_heals_lose_nothing(data, sizes, peers, copies):
    live, table = set(peers), placed(sizes, peers, copies)
    for _ in range(data.draw(st.integers(1, 6))):
        deaths = data.draw(st.integers(0, min(copies, len(live)) - 1))
        dead = set(data.draw(st.permutations(sorted(live)))[:deaths])
        back = set(data.draw(st.sets(st.sampled_from(sorted(peers)))))
        live = (live - dead) | back
        held = living(table, live - (back & dead))  # a returned worker holds nothing
        assert not lost(held)
        table = refilled(held, sizes, live, copies)
        assert_held(table, sizes, live, copies)
        for block, source, to in missing(held, table, sizes):
            assert source in held[block] and to not in held[block] and to in table[block]


HOSTS = st.lists(st.sampled_from("abc"), min_size=16, max_size=16).map(lambda names: dict(enumerate(names)))


@given(st.data(), SIZES, PEERS, st.integers(1, 4), HOSTS)
def test_with_any_hosts_each_block_has_its_holders_and_no_peer_is_overloaded(data, sizes, peers, copies, hosts):
    live, table = set(peers), placed(sizes, peers, copies, hosts)
    for _ in range(data.draw(st.integers(1, 6))):
        deaths = data.draw(st.integers(0, min(copies, len(live)) - 1))
        dead = set(data.draw(st.permutations(sorted(live)))[:deaths])
        before, live = live, (live - dead) | set(data.draw(st.sets(st.sampled_from(sorted(peers)))))
        held = living(table, live & before - dead)
        most = max(load(held, sizes).values())
        table = refilled(held, sizes, live, copies, hosts)
        assert_held(table, sizes, live, copies)
        mean = min(copies, len(live)) * sum(sizes.values()) / len(live)
        assert max(load(table, sizes).values()) <= max(most, 1.04 * mean + (copies + 1) * max(sizes.values()))


@given(st.integers(3, 5), st.integers(1, 3), st.integers(2, 3), st.data())
def test_repaired_copies_are_on_another_host_if_there_is_room(count, each, copies, data):
    """Hosts have equal numbers of peers, and there are more hosts than copies. One peer dies and returns."""
    copies = min(copies, count - 1)
    live = set(range(count * each))
    hosts, sizes = {peer: f"host-{peer % count}" for peer in live}, of_sizes([1] * (60 * len(live)))
    table = placed(sizes, live, copies, hosts)
    assert on_one_host(table, hosts) is None
    victim = data.draw(st.sampled_from(sorted(live)))
    table = refilled(living(table, live - {victim}), sizes, live - {victim}, copies, hosts)
    loads = load(table, sizes)
    for holders in table.values():
        on = {hosts[peer] for peer in holders}
        if len(on) < copies:
            share = copies * sum(sizes.values()) / (len(live) - 1)
            assert all(loads[peer] >= 0.95 * share for peer in loads if hosts[peer] not in on)
    table = refilled(table, sizes, live, copies, hosts)
    assert on_one_host(table, hosts) is None or copies == 3
    assert sum(len({hosts[peer] for peer in of}) == copies for of in table.values()) >= 0.95 * len(table)


def test_a_host_that_holds_all_copies_of_a_block_is_named():
    assert on_one_host({UnitId(0, 0): [0, 1], UnitId(0, 1): [1, 2]}, {0: "a", 1: "b", 2: "b"}) == "b"
    assert on_one_host({UnitId(0, 0): [0], UnitId(0, 1): [1, 2]}, {0: "a", 1: "a", 2: "b"}) is None, (
        "a block with a single holder is not reported"
    )


@given(SIZES, PEERS, st.integers(1, 4))
def test_nothing_moves_without_a_death_or_a_return(sizes, peers, copies):
    table = placed(sizes, peers, copies)
    assert refilled(table, sizes, peers, copies) == table


@pytest.mark.parametrize("copies", [2, 3])
def test_a_refill_moves_little_more_than_the_minimum_and_keeps_loads_equal(copies):
    """Eight peers with 4,096 blocks of a million elements. Two peers die and return."""
    sizes, live = of_sizes([1 << 20] * 4096), set(range(8))
    table = placed(sizes, live, copies)
    for event in (-3, -6, 3, 6):
        live = live - {-event} if event < 0 else live | {event}
        held = living(table, live)
        new = refilled(held, sizes, live, copies)
        moved = len(missing(held, new, sizes))
        least = sum(-event in holders for holders in table.values()) if event < 0 else copies * len(sizes) / len(live)
        assert moved <= 1.15 * least, (event, moved / least)
        loads = load(new, sizes)
        assert max(loads.values()) <= 1.1 * sum(loads.values()) / len(live), (event, loads)
        first = Counter({holders[0]: 0 for holders in new.values()})
        first.update(holders[0] for holders in new.values())
        assert max(first.values()) <= 1.25 * len(sizes) / len(live), (event, first)
        table = new


@settings(deadline=None)
@given(st.integers(0, 1000))
def test_all_holders_share_the_sending_of_copies(seed):
    rng = random.Random(seed)
    sizes = of_sizes([1] * 300)
    table = placed(sizes, range(6), 3)
    dead = rng.randrange(6)
    live = set(range(6)) - {dead}
    held = living(table, live)
    sent = Counter(source for _, source, _ in missing(held, refilled(held, sizes, live, 3), sizes))
    assert sent and max(sent.values()) <= 0.6 * sum(sent.values())


def test_blocks_lost_by_two_simultaneous_deaths_are_named():
    table = placed(of_sizes([1] * 8), range(4), 2)  # the groups are {0, 2} and {1, 3}
    first, second = groups(range(4), 2)[0]
    assert lost(living(table, set(range(4)) - {first, second})) == [
        block for block, holders in table.items() if set(holders) == {first, second}
    ]
    assert not lost(living(table, set(range(4)) - {0, 1}))
