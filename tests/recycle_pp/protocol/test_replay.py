"""The events of a job are a complete record of its decisions."""

from recycle_schedules import Worker

from recycle_pp.protocol.events import SavingChanged

from .orders import Order
from .world import Fault

KINDS = ("kill", "lose", "leave", "cut", "orphan")


def test_a_fresh_job_given_the_same_events_decides_the_same():
    for seed in range(20):
        kind, victim = KINDS[seed % len(KINDS)], Worker(seed % 2, seed // 2 % 2)
        faults = (Fault(20 + 7 * seed, kind, victim), Fault(60 + 7 * seed, "revive", victim))
        world = Order(
            (2, 2, 2),
            faults,
            steps=3,
            stagger=seed % 2 == 1,
            copies=seed % 3,
            evaluate_every=2,
            save_every=2,
            seed=seed,
        ).run()
        again = world.fresh_job()
        for event, outcome in world.log:
            assert again.handle(event) == outcome, (seed, event)


def test_a_new_job_has_no_checkpoint_in_progress():
    """So the coordinator must repeat the state of saving to each job that replaces another one."""
    job = Order((2, 2, 2), steps=1).run().fresh_job()
    assert job.saving == SavingChanged(occupied=False, due=False)
    job.handle(SavingChanged(occupied=True, due=True))
    assert job.saving.occupied and job.saving.due
