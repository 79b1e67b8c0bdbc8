"""The coordinator's table of units, from the reports of workers."""

import re
from array import array
from collections import Counter
from itertools import chain, combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recycle_schedules import Worker

from recycle_pp.protocol.ballot import ProtocolViolation, make_vote
from recycle_pp.protocol.holdings import Holdings
from recycle_pp.protocol.stage_lost import StageLost
from recycle_pp.protocol.units import Units
from recycle_pp.wire.messages.generations import Report, Shares
from recycle_pp.wire.messages.units import UnitId

COUNT = 6
U = [UnitId(stage, number) for stage in range(2) for number in range(COUNT)]  # stage 0 has layer 0, stage 1 layer 1
ALL = {3 * stage + pipeline: Worker(pipeline, stage) for stage in range(2) for pipeline in range(3)}


def layer(stage, count=COUNT):
    return {stage: [(f"{stage}.{number}", 128) for number in range(count)]}


def blank(member, stage=0, count=COUNT):
    """The holdings of a member with the whole initial state of a stage."""
    return Holdings(member, [UnitId(stage, number) for number in range(count)], -1)


def described(copies, *members, stage=0, count=COUNT):
    """A table, after these members have built the stage."""
    units = Units(copies)
    for member in members:
        units.describe(member, stage, "", layer(stage, count))
    return units


def share(units, found, committed):
    shares = units.share(0, {p: holdings.reported() for p, holdings in found.items()}, committed)
    for holdings in found.values():
        holdings.adopt(shares)
    return shares


def heal(found, committed):
    for holdings in found.values():
        for block, _, to in holdings.shares.copies:
            if to == holdings.me:
                holdings.took(block)
        holdings.settled()
        holdings.gathered(committed)


def holding(*members, count=COUNT):
    return {member: blank(member, count=count) for member in members}


def running(copies, *members, count=COUNT):
    """The table and the holdings of a stage of these members, after step 0."""
    units, found = described(copies, *members, count=count), holding(*members, count=count)
    assert share(units, found, -1).copies == [], "each member starts with the whole stage"
    heal(found, -1)
    for holdings in found.values():
        holdings.commit(0, [])
        holdings.gathered(0)
    return units, found


def test_after_a_death_only_missing_units_are_copied_and_no_weights_are_sent():
    units, found = running(2, 0, 1, 2, 3)
    dead = found.pop(1)
    shares = share(units, found, 0)
    assert len(shares.copies) == len(dead.units) and shares.knows is None


def test_a_worker_that_returns_without_state_is_sent_its_units_and_all_weights():
    units, found = running(2, 0, 1)
    found.pop(1)
    share(units, found, 0)
    heal(found, 0)
    found |= holding(1)
    found[1].join(committed=3)
    assert found[1].reported().loaded is None
    found[0].commit(3, [])
    found[0].gathered(3)
    shares = share(units, found, 3)
    assert [copy[1:] for copy in shares.copies] == [(0, 1)] * 6
    assert shares.knows == 0


def test_a_worker_that_returns_without_state_is_sent_exponents_although_no_peer_has_gathered_weights_for_two_steps():
    units, found = running(0, 0, 1)
    found.pop(1)
    share(units, found, 0)
    heal(found, 0)
    for step in (1, 2, 3):
        found[0].commit(step, [])  # each time, a new generation begins before the weights are sent
    found[1] = blank(1)
    found[1].join(committed=3)
    shares = share(units, found, 3)
    assert [copy[1:] for copy in shares.copies] == [(0, 1)] * COUNT and shares.knows == 0


def test_an_interrupted_heal_continues_with_the_units_that_have_arrived():
    units, found = running(2, 0, 1, 2)
    found.pop(0)
    first = share(units, found, 0)
    block, _, to = first.copies[0]
    found[to].took(block)
    again = share(units, found, 0)
    assert again.holders == first.holders and again.copies == first.copies[1:]
    successor = share(described(2, 1), found, 0)  # a new coordinator has only the workers' reports
    assert block not in [copy[0] for copy in successor.copies]


def test_a_unit_without_a_holder_is_lost():
    units, found = running(2, 0, 1, 2, 3)
    gone = found[0].units & found.pop(2).units
    found.pop(0)
    with pytest.raises(StageLost) as lost:
        share(units, found, 0)
    assert str(lost.value) == f"stage 0 has lost all copies of {len(gone)} of its 6 units"


NAME = "unit 2 of layer 0 (0.2)"


def compared(copies, flips, changed=(), third=False):
    """The result of comparing votes, if the workers `flips` have a flipped copy of block 2."""
    units, found = running(copies, *range(copies))
    units._third, units.hosts = third, {0: "h"}
    votes = {
        p: make_vote(
            1, 4, [], True, True, [], [], False, array("q", [7, 7, 8 if p in flips else 7, 7, 7, 7]).tobytes(),
            [U[2]] if p in changed else [],
        )
        for p in found
    }  # fmt: skip
    return units.compare({p: Worker(p, 0) for p in found}, votes, 4)


@pytest.mark.parametrize(
    ("hosts", "says"),
    [
        ("aabb", None),
        ("aaaa", None),
        ("aaab", "all copies of some units of the state of stage 0 are on a: if this host is lost, the job restarts"),
    ],
)
def test_a_group_on_one_of_several_hosts_is_reported(hosts, says):
    units, found = described(2, 0), holding(0, 1, 2, 3)
    units.hosts = dict(enumerate(hosts))
    share(units, found, -1)
    said = units.on_one_host()
    assert said == says if says is None else said.startswith(says)


@pytest.mark.parametrize(
    ("copies", "third", "says"),
    [
        (2, False, f"workers 0.0 on h and 1.0 hold different copies of {NAME}, found in step 4. This is"),
        (2, True, f"different copies of {NAME}, found in step 4, and it is unknown which one is right. This is"),
        (3, False, f"worker 1.0 holds a different copy of {NAME} than 0.0 on h and 2.0, found in step 4. This is"),
    ],
)
def test_if_the_wrong_copy_is_unknown_or_must_end_the_job_the_error_names_worker_host_and_unit(copies, third, says):
    with pytest.raises(ProtocolViolation, match=re.escape(says)):
        compared(copies, flips=[1], third=third)


@pytest.mark.parametrize(
    ("copies", "changed", "detail"),
    [
        (3, [], f"its copy of {NAME} differs from the other holders' copies"),
        (3, [1], f"its copy of {NAME} has changed since its update"),
        (2, [1], f"its copy of {NAME} has changed since its update"),
        (1, [1], f"its copy of {NAME} has changed since its update"),
    ],
)
def test_a_copy_that_differs_from_two_or_has_changed_since_its_update_is_wrong(copies, changed, detail):
    wrong = min(1, copies - 1)
    found = compared(copies, flips=[wrong], changed=[min(of, wrong) for of in changed], third=True)
    assert found == {wrong: detail}


def test_holders_that_agree_are_all_right():
    assert compared(2, flips=[]) == compared(3, flips=[], third=True) == {}


some_of_them = st.sets(st.sampled_from(sorted(ALL)))


def played(members):
    return {member: ALL[member] for member in members}


def table(copies, live):
    """The coordinator's table, at the start of a job of these members."""
    units = Units(copies)
    for member in live:
        units.describe(member, ALL[member].stage, "", layer(ALL[member].stage))
    reports = {member: Report(0, [], False, 0.0, blank(member, ALL[member].stage).reported()) for member in live}
    units.share_out(played(live), reports, -1)
    return units


def held(units, member):
    return {unit for unit, holders in units._tables[ALL[member].stage].items() if member in holders}


@given(some_of_them, st.sets(st.sampled_from(sorted(ALL)), min_size=1), st.integers(0, 3))
def test_a_worker_leaves_only_if_a_peer_and_a_copy_of_each_of_its_units_stay(leaving, live, copies):
    units = table(copies, live)
    gone = units.leavers(leaving, played(live))
    assert gone <= leaving & live
    for member in gone:
        stay = {other for other in live - gone if ALL[other].stage == ALL[member].stage}
        assert stay - leaving and held(units, member) <= set().union(*(held(units, other) for other in stay))
    if copies == 1:
        assert not any(held(units, member) for member in gone)


def test_all_workers_that_can_leave_do_so_at_once_or_in_turn_if_there_are_few_copies():
    for leaving in chain.from_iterable(combinations(ALL, n) for n in range(4)):
        stay = {worker.stage for member, worker in ALL.items() if member not in leaving}
        free = {member for member in leaving if ALL[member].stage in stay}
        assert table(0, ALL).leavers(leaving, ALL) == free
        left, live = set(leaving), set(ALL)
        while gone := table(2, live).leavers(left, played(live)):
            left, live = left - gone, live - gone
        assert left == set(leaving) - free


@given(some_of_them, st.integers(0, 3))
def test_the_savers_of_a_checkpoint_save_every_unit_once(gone, copies):
    live = {*ALL} - gone
    units = table(copies, ALL)
    if any(live.isdisjoint(of) for stage in range(2) for of in units._tables[stage].values()):
        return  # a unit is lost
    savers, saved = units.savers(played(live)), Counter()
    for member in live:
        holdings = blank(member)
        holdings.adopt(Shares.of(units._tables[ALL[member].stage], not copies, [], None))
        holdings.commit(4, savers)
        mine = holdings.saves[4]
        assert bool(mine) <= (member in savers)
        saved.update(mine)
    assert saved == Counter(U)
    assert copies or len(savers) == 2, "one worker of each stage has all of its state"


@pytest.mark.parametrize("copies", [0, 1, 2, 3])
def test_a_joiner_follows_exactly_the_units_that_it_will_hold_as_a_member(copies):
    units, found = running(copies, 0, 1, 2)
    found.pop(2)
    if copies == 1:
        return  # a unit is lost
    share(units, found, 0)
    heal(found, 0)
    live = {p: Worker(p, 0) for p in found}
    gives = units.sources(2, 0, live, {0: 1})
    wanted = sorted(unit for of in gives.values() for unit in of)
    assert wanted == sorted({*wanted}) and units.give(gives)
    assert copies or gives == {1: U[:COUNT]}, "the only donor is the one that serves the fewest joiners"
    for holdings in found.values():
        holdings.commit(1, [])
        holdings.gathered(1)
    found[2] = blank(2)
    found[2].caught_up(1, wanted)
    found[2].join(1)
    shares = share(units, found, 1)
    assert shares.copies == [] and [u for u, of in shares.holders.items() if 2 in of] == wanted
    assert (shares.knows is None) == (len(wanted) == 6), "a worker lacks the weights of units that it does not hold"


def test_two_joiners_hold_the_units_that_they_followed_even_if_one_starts_again():
    units, found = running(2, 0, 1, 2, 3, count=10 * COUNT)
    for gone in (2, 3):
        found.pop(gone)
        share(units, found, 0)
        heal(found, 0)
    live = {p: Worker(p, 0) for p in found}
    first, second = (units.sources(p, 0, live, {}) for p in (2, 3))
    assert first and second
    units.died(2)
    again = units.sources(2, 0, live, {})
    for holdings in found.values():
        holdings.commit(1, [])
        holdings.gathered(1)
    for member, gives in ((2, again), (3, second)):
        found[member] = blank(member, count=10 * COUNT)
        found[member].caught_up(1, [unit for of in gives.values() for unit in of])
        found[member].join(1)
    shares = share(units, found, 1)
    assert shares.copies == [] and all(len(of) == 2 for of in shares.holders.values())
    held = Counter(p for of in shares.holders.values() for p in of)
    assert min(held.values()) > 20, "an equal share is 30"


def stages(copies, *, count=COUNT):
    """Two stages with three members and two layers each, after step 0. Returns (units, holdings)."""
    units, found = Units(copies), {}
    for member, worker in ALL.items():
        layers = {layer: [(f"{layer}.{n}", 128) for n in range(count)] for layer in LAYOUT[worker.stage]}
        units.describe(member, worker.stage, "", layers)
        found[member] = Holdings(member, [UnitId(layer, n) for layer in layers for n in range(count)], -1)
    adopt(units, found, -1)
    for holdings in found.values():
        holdings.commit(0, [])
        holdings.gathered(0)
    return units, found


LAYOUT, THEN = {0: [0, 1], 1: [2, 3]}, {0: [0], 1: [1, 2, 3]}


def adopt(units, found, committed, layout=LAYOUT):
    live = played(found)
    reports = {m: Report(0, [], False, 0.0, of.reported(layout[ALL[m].stage], committed)) for m, of in found.items()}
    shares = units.share_out(live, reports, committed)
    for member, holdings in found.items():
        holdings.adopt(shares[ALL[member].stage])
    return shares


@pytest.mark.parametrize("copies", [0, 1, 2, 3])
def test_after_a_move_no_unit_is_copied_and_each_has_its_holders(copies):
    """The receivers have already followed the units that they hold in the new layout."""
    units, found = stages(copies)
    sources = Counter()
    for member in (3, 4, 5):
        gives = units.moved(member, THEN[1], ALL, {0: 1})
        assert units.give(gives) and (copies or [*gives] == [1]), "the only donor serves the fewest joiners"
        sources.update((unit, donor) for donor, of in gives.items() for unit in of)
        found[member].arriving = 0, [unit for of in gives.values() for unit in of]
    assert not copies or set(sources.values()) == {1}, "the copies of a unit come from different holders"
    assert units.relayout(THEN, ALL) == [0, 1]
    assert not units.unchanged(0, [0, 1, 2]) and not units.unchanged(1, [3, 4, 5])
    shares = adopt(units, found, 0, THEN)
    for stage, layers in THEN.items():
        assert [*shares[stage].holders] == [UnitId(layer, n) for layer in layers for n in range(COUNT)]
        assert {len(of) for of in shares[stage].holders.values()} == {copies or 3}
    assert shares[1].copies == [] and units.unchanged(1, [3, 4, 5])


def test_each_receiver_follows_a_unit_of_each_new_layer():
    """A unit is sent together with the exponents of its layer, and a receiver needs those of all its layers."""
    units, _ = stages(1, count=1)
    for member in (3, 4, 5):
        gives = units.moved(member, [0, 1, 2, 3], ALL, {})
        assert {unit.layer for of in gives.values() for unit in of} == {0, 1}


def test_a_layer_without_a_live_holder_of_some_unit_cannot_be_followed():
    units, _ = stages(1)
    assert units.moved(3, THEN[1], {m: worker for m, worker in ALL.items() if m in (0, 3, 4, 5)}, {}) == {}
