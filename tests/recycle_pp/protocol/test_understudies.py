"""The last worker of a stage dies: its understudy takes over, whatever else happens, and no checkpoint is read."""

from collections import Counter
from dataclasses import replace

import pytest
from recycle_schedules import Worker

from .orders import Order, assert_kept, assert_kept_by_all
from .world import Fault

FIRST, LAST = Worker(0, 1), Worker(1, 1)  # of stage 1; FIRST dies at the start, then LAST is alone
ALONE = Order((2, 2, 2), (Fault(60, "kill", FIRST),), 7, understudy=True, patience=None)


def and_then(order, *faults):
    return replace(order, faults=(*order.faults, *faults))


def drawn(seed):
    return Order.drawn(seed, alone=True, moves=seed % 4 == 3)


def in_step_at(order):
    """The first event at which the understudy could take over."""
    return order.run().coordinator.in_step_at


@pytest.mark.parametrize("each", [41, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("stagger", [False, True])
@pytest.mark.parametrize("shape", [(2, 2, 2), (2, 3, 2)])
def test_the_last_worker_of_a_stage_may_die_at_any_event_once_its_understudy_is_in_step(shape, stagger, each):
    order = replace(ALONE, shape=shape, stagger=stagger, evaluate_every=2)
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
def test_the_successor_of_a_coordinator_that_dies_with_the_last_worker_lets_the_understudy_take_over(stagger, each):
    for later in range(0, 300, each):
        order = replace(ALONE, stagger=stagger, seed=later)
        at = in_step_at(order) + later
        for kinds in (("kill", "orphan"), ("orphan", "kill")):
            faults = [Fault(at + k, kind, LAST) for k, kind in enumerate(kinds)]
            world = and_then(order, *faults).run().coordinator
            assert (world.lost, world.restores, world.job.committed) == (None, 0, 6)
            assert (world.took_over.keys(), world.takeovers) == ({LAST}, 1)  # perhaps by both coordinators


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


def test_the_dead_process_comes_back_in_the_old_role_of_its_understudy():
    at = in_step_at(ALONE)
    order = and_then(replace(ALONE, steps=9), Fault(at + 20, "kill", LAST), Fault(at + 60, "revive", LAST))
    world = order.run().coordinator
    played = {member: str(node.role) for member, node in world.alive.items()}
    assert world.took_over == {LAST: 1} and sorted(played.values()) == ["0.0", "1.0", "1.1"]
    assert played[3] != "1.1", "the understudy plays it"


def test_the_last_worker_of_a_stage_is_no_understudy_and_one_pipeline_has_none():
    alone = and_then(ALONE, Fault(60, "kill", Worker(1, 0))).run().coordinator
    assert alone.job.committed == 6 and not alone.job.followers.understudies
    assert replace(ALONE, shape=(1, 2, 2), faults=()).run().coordinator.in_step_at == -1


def test_a_commit_waits_for_the_gradient_of_the_understudy_and_not_for_ever():
    """With patience 0 the job gives the understudy up whenever it would have to wait."""
    waits = [replace(ALONE, seed=seed).run().coordinator for seed in range(8)]
    gives_up = [replace(ALONE, seed=seed, patience=0).run().coordinator for seed in range(8)]
    assert all(world.job.committed == 6 and world.job.generation == 1 for world in (*waits, *gives_up))
    assert sum(world.expired for world in waits) == 0 < sum(world.expired for world in gives_up)


def test_random_orders_with_a_lonely_worker_keep_the_contract():
    assert_kept(drawn, range(150))


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_hundred_thousand_random_orders_with_a_lonely_worker_keep_the_contract():
    assert_kept_by_all(drawn)


def test_random_orders_end_with_and_without_an_understudy_in_step():
    ends = Counter()
    for seed in range(40):
        world = drawn(seed).run().coordinator
        ends += Counter(took=bool(world.took_over), lost=world.lost is not None, restored=world.restores > 0)
    assert set(ends) == {"took", "lost", "restored"}
