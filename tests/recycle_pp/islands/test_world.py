"""Islands that come and go, with random orders of everything that can happen to them and to their store."""

import pytest

from .world import World


def simulate(seed: int, actions: int = 400) -> World:
    world = World(seed)
    world.run(actions)
    world.settle()
    world.check()
    return world


def test_theta_is_equal_and_no_sample_counts_twice_in_random_orders():
    rounds = 0
    for seed in range(40):
        rounds += len(simulate(seed).closed)
    assert rounds > 200  # the worlds are not idle


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_theta_is_equal_and_no_sample_counts_twice_in_100_000_random_orders():
    for seed in range(1000, 101_000):
        simulate(seed, actions=120)
