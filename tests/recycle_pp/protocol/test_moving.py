"""The recovery contract while layers move: whole and sharded state, deaths at any event of a move, two moves."""

from collections import Counter
from dataclasses import replace

import pytest
from recycle_schedules import Worker

from .orders import Order, assert_kept, assert_kept_by_all
from .world import Fault, layout_of


def move(at, *layers):
    return Fault(at, "move", Worker(0, 0), layers)


def drawn(seed):
    """A random order with moves, and with whole state or one or two copies."""
    return Order.drawn(seed, copies=seed % 3, moves=True)


def drawn_with_a_wrong_block(seed):
    return Order.drawn(seed, copies=2 + seed % 2, flip=True, moves=True)


def layers_at_the_end(world):
    return world.coordinator.job.units.layout


MOVES = [((2, 2, 2), (1, 3)), ((2, 3, 2), (3, 2, 1)), ((3, 3, 1), (1, 1, 4)), ((1, 2, 2), (3, 1))]


@pytest.mark.parametrize("stagger", [False, True])
@pytest.mark.parametrize("copies", [0, 1, 2])
@pytest.mark.parametrize(("shape", "layers"), MOVES)
def test_without_failures_a_move_ends_in_one_new_generation_in_any_order_of_events(shape, layers, copies, stagger):
    for seed in range(4):
        order = Order(shape, (move(60, *layers),), 6, stagger, 2, 2, seed=seed, copies=copies, patience=None)
        world = order.run()
        job = world.coordinator.job
        assert (job.committed, job.generation, world.coordinator.saved) == (5, 1, 6)
        assert world.coordinator.moves == {"switched": 1} and layers_at_the_end(world) == layout_of(layers)


@pytest.mark.parametrize("each", [61, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("stagger", [False, True])
@pytest.mark.parametrize("kind", ["kill", "reset"])
@pytest.mark.parametrize("copies", [0, 2])
def test_a_fault_at_any_event_of_a_move_loses_nothing_and_the_move_usually_completes(copies, kind, stagger, each):
    """The fault happens to a receiver, a donor or another worker."""
    order, ends = Order((2, 2, 2), (move(60, 1, 3),), 6, stagger, copies=copies, patience=None), Counter()
    for moment in range(60, order.run().events // 2, each):
        for victim in [Worker(d, s) for d in range(2) for s in range(2)]:
            faults = (*order.faults, Fault(moment, kind, victim))
            world = replace(order, faults=faults, seed=moment if stagger else None).run()
            assert world.coordinator.lost is None and world.coordinator.restores == 0
            assert world.coordinator.job.committed == 5
            ends += world.coordinator.moves
    assert ends["abandoned"] < ends["switched"] / 10


@pytest.mark.parametrize("each", [13, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("copies", [0, 2])
def test_a_second_fault_after_the_death_of_a_receiver_in_the_switch_changes_nothing(copies, each):
    order = Order((3, 2, 2), (move(60, 1, 3),), 6, copies=copies, patience=None)
    for offset in range(0, 340, each):
        quiet = replace(order, seed=offset, stagger=offset % 2 == 1)
        first = Fault(quiet.run().coordinator.switched_at - offset % 20, "kill", Worker(0, 1))
        later = ("kill", "cut", "revive", "orphan")[offset % 4]
        second = Fault(first.at + offset, later, Worker(0, later == "revive"))
        world = replace(quiet, faults=(*order.faults, first, second)).run()
        assert world.coordinator.lost is None and world.coordinator.restores == 0
        assert world.coordinator.job.committed == 5


@pytest.mark.parametrize("each", [61, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("stagger", [False, True])
@pytest.mark.parametrize("copies", [0, 2])
def test_the_successor_of_a_coordinator_that_dies_at_any_event_of_a_move_finds_the_adopted_layout(
    copies, stagger, each
):
    order = Order((2, 2, 2), (move(60, 1, 3),), 6, stagger, save_every=3, copies=copies, patience=None)
    layouts = set()
    for moment in range(60, order.run().events, each):
        for kind in ("kill", "reset"):
            faults = (Fault(moment, "orphan", Worker(0, 0)), Fault(moment, kind, Worker(1, 1)))
            world = replace(order, faults=(*order.faults, *faults), seed=moment).run()
            assert world.coordinator.lost is None and world.coordinator.job.committed == 5
            layouts.add(len(layers_at_the_end(world)[0]))
    assert layouts == {1, 2}, "a move is abandoned before its layout is adopted, and never afterwards"


@pytest.mark.parametrize("each", [61, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("copies", [0, 2])
def test_a_move_requested_at_any_event_of_another_replaces_it_or_starts_from_its_layout(copies, each):
    order, ends = Order((2, 3, 2), (move(60, 3, 2, 1),), 9, copies=copies, patience=None), Counter()
    for moment in range(61, order.run().events // 2, each):
        world = replace(
            order, faults=(*order.faults, move(moment, 1, 1, 4)), seed=moment, stagger=moment % 2 == 1
        ).run()
        assert layers_at_the_end(world) == layout_of((1, 1, 4)) and world.coordinator.job.committed == 8
        ends += world.coordinator.moves
    assert ends["switched"] > ends["replaced"] > 1


@pytest.mark.parametrize("each", [5, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("copies", [0, 2])
def test_a_fault_or_another_move_at_any_event_of_a_switch_changes_nothing(copies, each):
    """A worker of the stage that gains a layer has died before, and its replacement is about to join."""
    back = Fault(140, "kill", Worker(2, 1)), Fault(160, "revive", Worker(2, 1))
    order = Order((3, 2, 2), (move(60, 1, 3), *back), 7, copies=copies, patience=None)
    for offset in range(-70, 70, each):
        quiet = replace(order, seed=offset + 70, stagger=offset % 2 == 1)
        at = quiet.run().coordinator.switched_at + offset
        kind = ("kill", "lose", "reset", "cut", "orphan", "move")[offset % 6]
        fault = move(at, 3, 1) if kind == "move" else Fault(at, kind, Worker(offset % 2, offset // 2 % 2))
        world = replace(quiet, faults=(*order.faults, fault)).run()
        assert world.coordinator.lost is None and world.coordinator.restores == 0
        assert world.coordinator.job.committed == 6


@pytest.mark.parametrize("copies", [0, 2])
def test_streams_between_live_workers_that_break_at_any_event_of_a_move_only_delay_it(copies):
    for offset in range(10, 150, 7):
        broken = Fault(60 + offset, "sever", Worker(offset % 2, offset // 2 % 2))
        order = Order((2, 2, 2), (move(60, 1, 3), broken), 8, copies=copies, patience=None, seed=offset)
        assert order.run().coordinator.moves == {"switched": 1}


@pytest.mark.parametrize("copies", [0, 2])
def test_units_that_have_arrived_for_a_move_are_dropped_if_the_move_is_abandoned(copies):
    order = Order((2, 2, 2), (move(60, 1, 3),), 7, copies=copies, patience=None)
    at = order.run().coordinator.switched_at - 30
    for given_up, end in ((move(at, 2, 2), ["replaced"]), (Fault(at, "orphan", Worker(0, 0)), [])):
        world = replace(order, faults=(*order.faults, given_up)).run()
        assert layers_at_the_end(world) == layout_of((2, 2)) and [*world.coordinator.moves] == end
        assert not any(node.arriving.weights for node in world.coordinator.alive.values())


@pytest.mark.parametrize("copies", [0, 1])
def test_a_move_that_is_unfinished_at_the_end_of_the_run_is_abandoned(copies):
    order = Order((2, 2, 2), steps=2, copies=copies)
    late = order.run().events - 40
    world = replace(order, faults=(move(late, 1, 3),)).run()
    assert world.coordinator.moves == {"abandoned": 1} and layers_at_the_end(world) == layout_of((2, 2))


def test_after_a_lost_stage_the_job_restarts_with_its_first_layout():
    both = (Fault(900, "kill", Worker(0, 1)), Fault(900, "kill", Worker(1, 1)))
    order = Order((2, 2, 2), (move(60, 1, 3), *both), steps=8, save_every=1, patience=None)
    world = order.run()
    assert world.coordinator.restores == 1 and world.coordinator.moves == {"switched": 1}
    assert layers_at_the_end(world) == layout_of((2, 2)) and world.coordinator.job.committed == 7


def test_random_orders_with_moves_keep_the_contract():
    assert_kept(drawn, range(45, 85))


def test_random_orders_with_moves_and_a_wrong_block_keep_the_contract():
    assert_kept(drawn_with_a_wrong_block, range(20))


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("draw", [drawn, drawn_with_a_wrong_block])
def test_a_hundred_thousand_random_orders_with_moves_keep_the_contract(draw):
    assert_kept_by_all(draw)


def test_random_orders_end_moves_in_every_way():
    ends = Counter()
    for seed in range(45):
        ends += drawn(seed).run().coordinator.moves
    assert set(ends) == {"switched", "replaced", "abandoned"} and ends["switched"] > 9
