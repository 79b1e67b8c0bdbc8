"""Settings that a user changes while the job runs."""

import pytest
from recycle_schedules import Worker

from .orders import Order
from .world import Fault

CHANGE = {"checkpoint.every": 1}
SEEDS = range(12)


def changed(seed, *faults, **how):
    order = Order((2, 2, 2), (Fault(60, "set", Worker(0, 0), (1,)), *faults), steps=5, save_every=5, seed=seed, **how)
    return order.run().coordinator


@pytest.mark.parametrize("stagger", [False, True])
def test_each_commit_after_a_change_carries_it_and_obeys_it(stagger):
    for seed in SEEDS:
        commits = changed(seed, stagger=stagger).commits
        carried = [commit.changes == CHANGE for commit in commits]
        assert carried == sorted(carried) and any(carried)
        assert [bool(commit.savers) for commit in commits[:-1]] == carried[:-1]


def test_a_change_that_all_workers_know_survives_a_new_coordinator_and_a_restart():
    """Workers know a change once they have voted for the step after the commit that carried it."""
    takeovers = restores = 0
    for seed in SEEDS:
        at = 290 + 15 * seed  # after two or three commits
        deaths = [Fault(at + 30, "kill", Worker(d, 1)) for d in range(2)] if seed % 3 == 0 else []
        coordinator = changed(seed, Fault(at, "orphan", Worker(0, 0)), *deaths)
        assert all(commit.changes == CHANGE for commit in coordinator.commits)
        takeovers, restores = takeovers + coordinator.takeovers, restores + coordinator.restores
    assert takeovers == len(SEEDS) and restores > 0
