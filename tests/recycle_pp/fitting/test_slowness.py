"""Slow workers are detected, and a busy machine makes no worker slow."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recycle_schedules import Worker

from recycle_pp.fitting.slowness import Slowness, Speed

OPS = 18  # number of ops that a worker runs in a step
seeds = st.integers(0, 1 << 32)


def job(workers=12, cores=2):
    slowness = Slowness()
    for n in range(workers):
        slowness.place(Worker(n, 0), "here", cores)
    return slowness, [Worker(n, 0) for n in range(workers)]


def shared_step(workers, cores, rng, slow=None):
    """(own, wall) of each worker in a step on a time-sharing scheduler.

    An op waits while others use the core. Some ops lose their core to another process for a long time. Lost caches
    lengthen the own time.
    """
    step = {}
    for worker in workers:
        own = wall = 0.0
        for _ in range(OPS):
            cost = rng.uniform(0.9, 1.25) * (slow or {}).get(worker, 1.0)
            others = sum(rng.random() < 0.7 for _ in workers[1:])
            wait = cost * max(0.0, (1 + others) / cores - 1) * rng.expovariate(1.0)
            if rng.random() < 0.03:
                wait += 10 * rng.random()
            own, wall = own + cost, wall + cost + wait
        step[worker] = own / OPS, wall / OPS
    return step


@given(seeds, st.integers(3, 12), st.integers(1, 2))
def test_workers_that_share_cores_are_never_slow(seed, count, cores):
    (slowness, workers), rng = job(count, cores), random.Random(seed)
    assert [slowness.add(shared_step(workers, cores, rng)) for _ in range(60)] == [[]] * 60


@pytest.mark.parametrize("factor", [1.5, 3.0])
@given(seed=seeds)
def test_a_longer_own_time_and_its_end_are_each_detected_within_8_steps_on_a_busy_machine(factor, seed):
    (slowness, workers), rng = job(), random.Random(seed)
    slow = workers[seed % 12]
    for _ in range(20):
        assert slowness.add(shared_step(workers, 2, rng)) == []
    found = [speed for _ in range(8) for speed in slowness.add(shared_step(workers, 2, rng, {slow: factor}))]
    assert found == [Speed(slow, pytest.approx(factor, rel=0.15))]
    over = [speed for _ in range(8) for speed in slowness.add(shared_step(workers, 2, rng))]
    assert over == [Speed(slow, 1.0)] and slowness.factors == {}


@given(st.floats(1.7, 4.0), st.integers(2, 8), seeds)
def test_another_process_on_the_core_and_its_end_are_each_detected_within_8_steps(factor, count, seed):
    (slowness, workers), rng = job(count, cores=8), random.Random(seed)

    def step(of):
        return {w: (1.0, rng.uniform(0.97, 1.03) * (of if w == workers[0] else 1.0)) for w in workers}

    for _ in range(20):
        assert slowness.add(step(1.0)) == []
    assert [s for _ in range(8) for s in slowness.add(step(factor))] == [Speed(workers[0], pytest.approx(factor, 0.1))]
    assert [s for _ in range(8) for s in slowness.add(step(1.0))] == [Speed(workers[0], 1.0)]


@given(st.floats(1.0, 1.6), seeds)
def test_a_worker_is_not_slow_if_its_profiled_steps_were_fast_by_chance(factor, seed):
    (slowness, workers), rng = job(4), random.Random(seed)

    def step(slow):
        return {
            w: (rng.uniform(0.97, 1.03) * (factor if w == workers[0] else 1.0) * slow.get(w, 1.0),) * 2 for w in workers
        }

    for _ in range(40):
        assert slowness.add(step({})) == []
    found = [speed for _ in range(8) for speed in slowness.add(step({workers[0]: 1.5}))]
    assert [speed.worker for speed in found] == [workers[0]], "a real slowdown must still be found"


def test_a_worker_that_is_much_slower_from_its_first_step_on_is_slow():
    slowness, workers = job(4)
    found = [s for _ in range(8) for s in slowness.add({w: (3.0 if w == workers[0] else 1.0, 1.0) for w in workers})]
    assert [speed.worker for speed in found] == [workers[0]]


def test_workers_of_the_one_busy_machine_among_several_are_not_slow():
    slowness = Slowness()
    workers = [Worker(d, s) for d in range(3) for s in range(2)]
    for w in workers:
        slowness.place(w, f"machine {w.pipeline}", 2)
    for _ in range(30):
        assert slowness.add({w: (1.0, 3.0 if w.pipeline == 0 else 1.0) for w in workers}) == []


@given(st.floats(1.5, 10.0))
def test_no_worker_is_slow_if_all_others_slow_down_alike(factor):
    slowness, workers = job(4)
    for n in range(30):
        assert slowness.add(dict.fromkeys(workers, (factor if n > 9 else 1.0,) * 2)) == []


def test_four_slow_steps_are_too_few():
    slowness, workers = job(4)
    for n in range(40):
        own = 50.0 if n % 10 < 4 else 1.0
        assert slowness.add({w: (own if w == workers[0] else 1.0, 1.0) for w in workers}) == []


def test_only_onset_and_recovery_are_returned():
    slowness, workers = job(2)

    def add(own, steps):
        return [s for _ in range(steps) for s in slowness.add({workers[0]: (own, own), workers[1]: (1.0, 1.0)})]

    assert add(1.0, 7) == [] and add(2.0, 7) == [Speed(workers[0], 2.0)]
    assert add(6.0, 7) == [] and slowness.factors == {workers[0]: 6.0}
    assert add(1.0, 7) == [Speed(workers[0], 1.0)]


def test_a_new_process_is_judged_by_its_own_steps_only():
    slowness, workers = job(2)
    for _ in range(6):
        slowness.add({workers[0]: (3.0, 3.0), workers[1]: (1.0, 1.0)})
    slowness.place(workers[0], "here", 2)
    for _ in range(20):
        assert slowness.add(dict.fromkeys(workers, (1.0, 1.0))) == []
