"""The recovery contract, tried at every event of small jobs and at random in larger ones (no sockets, no clock)."""

import random

import pytest
from recycle_schedules import Problem, Worker, plan

from recycle_pp.protocol.ledger import Record, remainder

from .simulator import World

SHAPES = [(2, 2, 2), (3, 1, 2), (2, 3, 2), (1, 2, 3)]


def in_turn():
    """Everybody gets a turn: the option after the last one."""
    last = 0

    def choose(n: int) -> int:
        nonlocal last
        last += 1
        return last % n

    return choose


def at_random(seed: int):
    rng = random.Random(seed)
    return lambda n: rng.randrange(n)


@pytest.mark.parametrize("stagger", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_without_failures_every_step_is_committed_in_any_order_of_events(shape, stagger):
    for seed in range(20):
        world = World(*shape, steps=3, stagger=stagger, evaluate_every=2).run(at_random(seed))
        assert world.job.committed == 2
        assert world.job.generation == 0


@pytest.mark.parametrize("stagger", [False, True])
@pytest.mark.parametrize("shape", [(2, 2, 2), (2, 1, 2), (2, 3, 1)])
def test_a_death_at_any_event_changes_nothing_but_who_works(shape, stagger):
    pipelines, stages, _ = shape
    events = World(*shape, stagger=stagger).run(in_turn()).events
    for moment in range(events):
        for victim in [Worker(d, s) for d in range(pipelines) for s in range(stages)]:
            world = World(*shape, stagger=stagger).run(in_turn(), kill={moment: victim})
            assert world.lost is None
            assert world.job.committed == 1


@pytest.mark.parametrize("stagger", [False, True])
def test_the_last_death_of_a_stage_is_told_apart(stagger):
    world = World(1, 2, 2, stagger=stagger).run(in_turn(), kill={30: Worker(0, 1)})
    assert world.lost == 1


@pytest.mark.parametrize("seed", range(300))
def test_random_deaths_returns_and_delays_keep_the_contract(seed):
    rng = random.Random(seed)
    shape = rng.choice([(2, 2, 2), (3, 2, 2), (3, 3, 1), (4, 1, 2), (3, 2, 3)])
    pipelines, stages, _ = shape
    workers = [Worker(d, s) for d in range(pipelines) for s in range(stages)]
    kill = {rng.randrange(1500): rng.choice(workers) for _ in range(rng.choice([2, 2, 3]))}
    revive = {moment + rng.randrange(1, 300): victim for moment, victim in kill.items()}
    world = World(
        *shape,
        steps=4,
        stagger=rng.random() < 0.5,
        evaluate_every=rng.choice([0, 2]),
        clipped=frozenset(s for s in range(4) if rng.random() < 0.2),
    ).run(at_random(seed), kill=kill, revive=revive)
    assert world.lost is not None or world.job.committed == 3


def test_a_profile_that_changes_the_form_of_backwards_in_mid_step_leaves_a_problem_that_can_be_planned():
    records = {w: Record(2) for w in map(Worker.parse, ("0.0", "1.0"))}
    for kind in "FIW":
        records[Worker(0, 0)].begin(kind, (0, 0))
        records[Worker(0, 0)].finish()
    problem = Problem(pipelines=2, stages=1, microbatches=1, backward="coupled")
    left = remainder(problem, records, busy={})
    assert left.problem.backward == "mixed"
    assert {op.kind for op in plan(left.problem).ops} <= set("FIWBO")
