"""When the last worker of a stage dies, its understudy takes over without a checkpoint, whatever else happens."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
from recycle_schedules import Worker

from recycle_pp.protocol.followers import Followers
from recycle_pp.protocol.understudies import Understudies
from recycle_pp.protocol.units import Units
from recycle_pp.wire.messages.units import UnitId

from .orders import Order, assert_kept, assert_kept_by_all
from .world import Fault

FIRST, LAST = Worker(0, 1), Worker(1, 1)  # of stage 1; FIRST dies at the start, then LAST is alone
ALONE = Order((2, 2, 2), (Fault(60, "kill", FIRST),), 7, understudy=True, patience=None)


def and_then(order, *faults):
    return replace(order, faults=(*order.faults, *faults))


def drawn(seed):
    return Order.drawn(seed, copies=2 * (seed % 5 > 2), alone=True, moves=seed % 4 == 3)


def in_step_at(order):
    """The first event at which the understudy could take over."""
    return order.run().coordinator.in_step_at


@pytest.mark.parametrize("each", [41, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("stagger", [False, True])
@pytest.mark.parametrize(("shape", "copies"), [((2, 2, 2), 0), ((2, 3, 2), 0), ((2, 2, 2), 2)])
def test_the_last_worker_of_a_stage_may_die_at_any_event_once_its_understudy_is_in_step(shape, copies, stagger, each):
    order = replace(ALONE, shape=shape, copies=copies, stagger=stagger, evaluate_every=2)
    quiet = order.run()
    for moment in range(quiet.coordinator.in_step_at, quiet.events, each):
        world = and_then(order, Fault(moment, "kill", LAST)).run().coordinator
        if world.job.live and world.took_over:
            assert (world.lost, world.restores, world.job.committed) == (None, 0, 6)
        else:
            assert world.job.committed == 6, "it dies after the last commit"


@pytest.mark.parametrize("each", [17, pytest.param(1, marks=pytest.mark.slow)])
def test_without_a_checkpoint_the_job_ends_only_if_the_understudy_was_not_in_step_yet(each):
    start = in_step_at(ALONE)
    for moment in range(100, start, each):
        world = and_then(ALONE, Fault(moment, "kill", LAST)).run().coordinator
        assert (world.lost == 1) == (not world.took_over)


@pytest.mark.parametrize("each", [29, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("stagger", [False, True])
def test_a_new_coordinator_lets_the_understudy_of_a_worker_that_died_with_the_old_one_take_over(stagger, each):
    for later in range(0, 300, each):
        order = replace(ALONE, stagger=stagger, seed=later)
        at = in_step_at(order) + later
        for kinds in (("kill", "orphan"), ("orphan", "kill")):
            faults = [Fault(at + k, kind, LAST) for k, kind in enumerate(kinds)]
            world = and_then(order, *faults).run().coordinator
            assert (world.lost, world.restores, world.job.committed) == (None, 0, 6)
            # Only the keys, because both coordinators may have let the understudy take over.
            assert (world.took_over.keys(), world.takeovers) == ({LAST}, 1)


def test_an_understudy_takes_over_although_the_donors_state_arrived_before_the_commit_of_that_state():
    for seed, delays in ((0, None), (1, 3), (8, 3)):
        order = replace(ALONE, seed=seed, delays=delays)
        world = and_then(order, Fault(in_step_at(order) + 24, "kill", LAST)).run().coordinator
        assert (world.lost, world.restores, world.took_over) == (None, 0, {LAST: 1})


def test_no_checkpoint_waits_for_an_understudy_that_dropped_its_commit_when_it_took_over():
    """The staggered optimizer does not wait for the commit of a checkpoint that a user has requested."""
    every = Fault(0, "set", LAST, (3,))
    for seed, moment in ((5, 726), (17, 402), (93, 407)):
        order = replace(ALONE, copies=2, steps=9, stagger=True, save_every=50, seed=seed, delays=3)
        world = and_then(order, every, Fault(moment, "kill", LAST)).run().coordinator
        assert (world.lost, world.took_over) == (None, {LAST: 1})


def test_a_new_coordinator_counts_a_worker_as_dead_although_its_new_process_has_started():
    for seed, back, later in ((0, 8, 12), (7, 14, 16), (12, 8, 12), (18, 14, 16)):
        order = replace(ALONE, seed=seed)
        at = in_step_at(order) + 5
        faults = Fault(at, "kill", LAST), Fault(at + back, "revive", LAST), Fault(at + later, "orphan", LAST)
        world = and_then(order, *faults).run().coordinator
        assert (world.lost, world.restores, world.job.committed) == (None, 0, 6)
        assert world.took_over.keys() == {LAST} and len(world.job.live) == 3


def test_a_dead_understudy_is_replaced_by_another_worker_of_the_fullest_stage():
    order = replace(ALONE, shape=(3, 2, 2), steps=9)
    order = and_then(order, Fault(60, "kill", Worker(2, 1)))
    at = in_step_at(order)
    for victim in (Worker(0, 0), Worker(1, 0), Worker(2, 0)):
        world = and_then(order, Fault(at + 5, "kill", victim), Fault(at + 500, "kill", LAST)).run().coordinator
        assert (world.lost, world.restores, world.took_over) == (None, 0, {LAST: 1})


def test_an_understudy_is_dismissed_when_the_stage_has_a_second_worker_again():
    world = and_then(ALONE, Fault(in_step_at(ALONE), "revive", FIRST)).run().coordinator
    assert not world.job.followers.understudies and not world.took_over
    assert not any(node.standing_in.weights or node.me.understudy for node in world.alive.values())


def test_a_dead_worker_returns_in_the_old_role_of_its_understudy():
    at = in_step_at(ALONE)
    order = and_then(replace(ALONE, steps=9), Fault(at + 20, "kill", LAST), Fault(at + 60, "revive", LAST))
    world = order.run().coordinator
    played = {member: str(node.role) for member, node in world.alive.items()}
    assert world.took_over == {LAST: 1} and sorted(played.values()) == ["0.0", "1.0", "1.1"]
    assert played[3] != "1.1", "the understudy keeps the role 1.1"


def test_the_last_worker_of_a_stage_cannot_be_an_understudy_and_a_single_pipeline_has_none():
    alone = and_then(ALONE, Fault(60, "kill", Worker(1, 0))).run().coordinator
    assert alone.job.committed == 6 and not alone.job.followers.understudies
    assert replace(ALONE, shape=(1, 2, 2), faults=()).run().coordinator.in_step_at == -1


def test_an_understudy_is_only_chosen_if_its_own_stage_leaves_enough_memory_free():
    units, followers, notes = Units(0), Followers(), []
    live = {0: Worker(0, 0), 2: Worker(1, 0), 4: Worker(2, 0), 3: Worker(1, 1)}
    for member, worker in live.items():
        units.describe(member, worker.stage, "", {worker.stage: [("w", 100)]})
    understudies, room = Understudies(followers, each=8), {live[4]: 799.0, live[2]: 800.0}

    def chosen():
        problem = SimpleNamespace(room=lambda worker: room.get(worker, 0.0))
        understudies.choose(live, units, (), lambda: problem, True, lambda name, **fields: notes.append((name, fields)))
        return [*followers.understudies]

    assert chosen() == [2], "the first choice, member 4, lacks a byte"
    room[live[2]] = 700.0
    assert chosen() == [], "now member 2 lacks room, too"
    dismissed, (name, about) = [name for name, _ in notes[:-1]], notes[-1]
    assert dismissed == ["understudy", "understudy_dismissed"]
    assert (name, about["role"], about["needed"], about["free"]) == ("understudy_refused", live[4], 800, 799)
    assert chosen() == [] and len(notes) == 3, "the refusal is noted once in a generation"
    room[live[2]] = 800.0
    understudies.regrouped()
    assert chosen() == [2]
    followers.resume_understudy(2, live[3], donor=3, session=5)  # as after a take-over by a new coordinator
    room[live[2]] = 799.0
    assert chosen() == []


def test_an_understudy_takes_over_even_if_the_broken_stream_is_reported_before_the_death_of_its_donor():
    units, followers, live = Units(0), Followers(), {0: Worker(0, 0), 2: Worker(1, 0), 3: Worker(1, 1)}
    for member, worker in live.items():
        units.describe(member, worker.stage, "", {worker.stage: [("w", 100)]})
    units.whole = lambda stage, live, serving: {3: [UnitId(1, 0)]}
    understudies = Understudies(followers, each=8)

    def lost(committed):
        followers.add_understudy(2, live[3])
        followers.find_donors(committed, 1, live, units, live)
        session = followers.understudies[2].session
        understudies.prepared(2, session, committed + 1, committed)
        assert understudies.heir(1, committed) == 2 and followers.stream_lost(session, committed)

    lost(committed=5)
    assert understudies.heir(1, 5) == 2
    assert understudies.heir(1, 6) is None, "its copy lacks a commit"
    lost(committed=6)
    followers.find_donors(6, 1, live, units, live)
    assert understudies.heir(1, 6) is None, "its next session begins without a copy"
    followers.add_understudy(2, live[3])
    followers.find_donors(7, 1, live, units, live)
    followers.stream_lost(followers.understudies[2].session, 7)
    assert understudies.heir(1, 7) is None, "it was not in step yet"


def test_a_commit_waits_for_the_understudys_gradient_but_not_forever():
    """With patience 0 the job dismisses the understudy whenever it would have to wait for it."""
    waits = [replace(ALONE, seed=seed).run().coordinator for seed in range(8)]
    gives_up = [replace(ALONE, seed=seed, patience=0).run().coordinator for seed in range(8)]
    assert all(world.job.committed == 6 and world.job.generation == 1 for world in (*waits, *gives_up))
    assert sum(world.expired for world in waits) == 0 < sum(world.expired for world in gives_up)


def test_random_orders_with_a_last_worker_of_a_stage_keep_the_contract():
    assert_kept(drawn, range(150))


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_hundred_thousand_random_orders_with_a_last_worker_of_a_stage_keep_the_contract():
    assert_kept_by_all(drawn)


def test_arrived_layers_stay_if_a_second_move_dismisses_an_understudy_before_the_stage_takes_them():
    """The understudy is chosen at the switch of the first move, in which its own stage gains layers."""
    for seed in (7523, 14739, 50859):
        Order.drawn(seed, copies=2, alone=True, moves=True).run()


def test_random_orders_end_with_and_without_an_understudy_in_step():
    ends = Counter()
    for seed in range(40):
        world = drawn(seed).run().coordinator
        ends += Counter(took=bool(world.took_over), lost=world.lost is not None, restored=world.restores > 0)
    assert set(ends) == {"took", "lost", "restored"}
