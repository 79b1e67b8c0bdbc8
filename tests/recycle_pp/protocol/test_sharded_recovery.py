"""The recovery contract with k copies of each block: k - 1 deaths lose nothing, with updates at the commit or early."""

from dataclasses import replace

import pytest
from recycle_schedules import Worker

from .orders import Order, assert_kept, assert_kept_by_all
from .world import Fault


def drawn(seed):
    """A random order with 2 or 3 copies. With 3, all peers hold each block, as shapes have at most 3 pipelines."""
    return Order.drawn(seed, copies=2 + seed % 2)


def drawn_with_a_wrong_block(seed):
    return Order.drawn(seed, copies=2 + seed % 2, flip=True)


@pytest.mark.parametrize("stagger", [False, True])
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("shape", [(2, 2, 2), (3, 1, 2), (1, 2, 3), (4, 1, 2)])
def test_without_failures_every_step_is_committed_in_any_order_of_events(shape, k, stagger):
    for seed in range(4):
        world = Order(shape, (), 3, stagger, evaluate_every=2, save_every=2, seed=seed, copies=k).run()
        assert (world.coordinator.job.committed, world.coordinator.job.generation, world.coordinator.saved) == (2, 0, 3)
        assert (world.speculations > 0) == stagger and not world.taken_back


@pytest.mark.parametrize("each", [13, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("stagger", [False, True])
@pytest.mark.parametrize("shape", [(2, 2, 2), (3, 1, 2), (4, 1, 2)])
def test_a_death_at_any_event_loses_nothing(shape, stagger, each):
    pipelines, stages, _ = shape
    order, taken_back = Order(shape, steps=3, copies=2, save_every=3, stagger=stagger), 0
    for moment in range(0, order.run().events, each):
        for victim in [Worker(d, s) for d in range(pipelines) for s in range(stages)]:
            world = replace(order, faults=(Fault(moment, "kill", victim),), seed=moment if stagger else None).run()
            assert world.coordinator.lost is None and world.coordinator.restores == 0
            assert world.coordinator.job.committed == 2
            taken_back += world.taken_back
    assert (taken_back > 0) == stagger, "some died between an update and its commit"


@pytest.mark.parametrize("each", [9, pytest.param(1, marks=pytest.mark.slow)])
def test_an_update_rolled_back_by_clipping_is_rolled_back_by_all_workers_with_its_weights(each):
    order = Order((4, 1, 2), steps=4, copies=2, stagger=True, clipped=frozenset({1}))
    for moment in range(0, order.run().events, each):
        world = replace(order, faults=(Fault(moment, "kill", Worker(1, 0)),), seed=moment).run()
        assert world.coordinator.lost is None and world.coordinator.job.committed == 3
    assert order.run().taken_back


@pytest.mark.parametrize("each", [13, pytest.param(2, marks=pytest.mark.slow)])
def test_two_deaths_at_any_two_events_lose_nothing_of_three_copies(each):
    events = Order((4, 1, 2), steps=2, copies=3).run().events
    for first in range(0, events, each):
        for later in (0, 1, 7, 20, 45):
            faults = (Fault(first, "kill", Worker(1, 0)), Fault(first + later, "kill", Worker(2, 0)))
            world = Order((4, 1, 2), faults, steps=2, copies=3, seed=first, stagger=later % 2 == 1).run()
            assert world.coordinator.lost is None and world.coordinator.job.committed == 1


@pytest.mark.parametrize("each", [9, pytest.param(1, marks=pytest.mark.slow)])
def test_a_worker_that_returns_at_any_event_takes_its_share(each):
    shape = (3, 1, 2)
    events = Order(shape, steps=4, copies=2).run().events
    dies = Fault(20, "kill", Worker(0, 0))
    for moment in range(25, events, each):
        faults = dies, Fault(moment, "revive", Worker(0, 0))
        world = Order(shape, faults, steps=4, copies=2, seed=moment, stagger=moment % 2 == 1).run()
        assert world.coordinator.lost is None and world.coordinator.job.committed == 3


@pytest.mark.parametrize("each", [11, pytest.param(1, marks=pytest.mark.slow)])
def test_the_successor_of_a_coordinator_that_dies_at_any_event_finds_all_holders(each):
    order = Order((3, 1, 2), steps=3, copies=2, save_every=2)
    for moment in range(0, order.run().events, each):
        faults = (Fault(moment, "orphan", Worker(0, 0)), Fault(moment, "kill", Worker(1, 0)))
        world = replace(order, faults=faults, seed=moment, stagger=moment % 2 == 1).run()
        assert world.coordinator.lost is None and world.coordinator.job.committed == 2


@pytest.mark.parametrize("each", [13, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("shape", [(4, 1, 2), (3, 2, 1)])
@pytest.mark.parametrize("kind", ["flip", "err"])
def test_a_block_that_becomes_wrong_at_any_event_is_detected_in_the_next_vote_and_not_used(kind, shape, each):
    """The world fails if a wrong value is applied or saved, or if a worker without a fault is killed."""
    k = 2 if kind == "flip" else 3  # with two copies, it is unknown which one a bad update made wrong
    order = Order(shape, steps=4, copies=k, third=True, save_every=2)
    events = order.run().events
    found = 0
    for moment in range(0, events, each):
        world = replace(order, faults=(Fault(moment, kind, Worker(1, 0)),), seed=moment).run()
        found += world.coordinator.mismatches == [Worker(1, 0)]
        # The blocks of the last step are compared at the end, without a vote. Then the job may stop.
        if not world.coordinator.stopped:
            assert world.coordinator.job.committed == 3 and world.coordinator.lost is None
    assert found > events / each / 2


@pytest.mark.parametrize("each", [11, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("later", ["kill", "orphan", "cut"])
def test_another_fault_during_the_detection_of_a_wrong_block_changes_nothing(later, each):
    order = Order((4, 1, 2), steps=3, copies=2, third=True)
    flip = Fault(order.run().events // 2, "flip", Worker(1, 0))
    for seed in range(5):
        for moment in range(0, 200, each):
            faults = (flip, Fault(flip.at + moment, later, Worker(2 * (later == "kill"), 0)))
            world = replace(order, faults=faults, seed=seed).run()
            assert world.coordinator.stopped or (
                world.coordinator.lost is None and world.coordinator.job.committed == 2
            )


def test_a_wrong_block_is_detected_again_or_its_step_void_after_the_coordinator_dies():
    """When the coordinator dies, all, some or none of the survivors know that the step is void."""
    order = Order((2, 2, 2), steps=3, copies=2, third=True)
    begins = order.run().events // 3
    for seed in range(40):
        flip = Fault(begins + seed, "flip", Worker(1, 0))
        found = replace(order, faults=(flip,), seed=seed).run()
        if found.coordinator.mismatches:
            dies = Fault(found.coordinator.found_at, "orphan", Worker(0, 0))
            world = replace(order, faults=(flip, dies), seed=seed).run()
            assert (
                world.coordinator.takeovers == 1
                and world.coordinator.lost is None
                and world.coordinator.job.committed == 2
            )


def test_without_a_copy_of_a_block_the_job_restarts_from_its_checkpoint_or_ends():
    """Both members of a group, peers 0 and 2 of four, die."""
    both = (Fault(60, "kill", Worker(0, 0)), Fault(60, "kill", Worker(2, 0)))
    assert Order((4, 1, 2), both, steps=3, copies=2).run().coordinator.lost == 0
    late = tuple(fault._replace(at=400) for fault in both)
    world = Order((4, 1, 2), late, steps=6, copies=2, save_every=1).run()
    assert world.coordinator.lost is None and world.coordinator.restores == 1 and world.coordinator.job.committed == 5


def test_unneeded_weights_are_not_sent_again():
    """A regression: a lost connection voids early updates, but not a stage's sums.

    One worker of the stage repeats its early update before another has the old weights back. Then a worker of another
    stage dies.
    """
    faults = (Fault(1012, "lose", Worker(0, 2)), Fault(1061, "kill", Worker(2, 2)))
    Order((3, 3, 1), faults, steps=4, copies=3, stagger=True, evaluate_every=2, save_every=2).run()


def test_if_a_block_is_lost_before_it_is_saved_the_job_restarts_from_the_previous_checkpoint():
    faults = (Fault(1300, "kill", Worker(2, 2)), Fault(1313, "kill", Worker(1, 2)))
    world = Order((3, 3, 1), faults, steps=4, copies=2, evaluate_every=2, save_every=2, seed=20294).run()
    assert world.coordinator.restores == 1 and world.coordinator.saved == 4


def test_random_deaths_returns_and_delays_keep_the_contract():
    assert_kept(drawn, range(80))


def test_random_orders_with_a_wrong_block_keep_the_contract():
    assert_kept(drawn_with_a_wrong_block, range(50))


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("draw", [drawn, drawn_with_a_wrong_block])
def test_a_hundred_thousand_random_orders_keep_the_contract(draw):
    assert_kept_by_all(draw)
