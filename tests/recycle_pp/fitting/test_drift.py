"""Workers that become slower than in their own first steps are found, but not if their machine has become busy."""

import random
from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st
from recycle_schedules import Worker

from recycle_pp.fitting.drift import FIRST, Drift
from recycle_pp.fitting.slowness import Slowness, Speed

WORKERS = [Worker(d, s) for d in range(2) for s in range(2)]
seeds = st.integers(0, 1 << 32)
few = settings(max_examples=20, deadline=None)  # an example has several hundred steps


def job(machines=lambda worker: "here"):
    slowness = Slowness()
    for worker in WORKERS:
        slowness.place(worker, machines(worker), 8)
    return slowness


def run(slowness, rng, steps, slow=None, waits=1.0):
    """Changes of speed that are reported in these steps. slow: worker -> factor; waits: wall time / own time."""
    found = []
    for _ in range(steps):
        own = {w: rng.uniform(0.9, 1.1) * (slow or {}).get(w, 1.0) for w in WORKERS}
        found += slowness.add({w: (x, x * waits * rng.uniform(1.0, 1.1)) for w, x in own.items()})
    return found


@few
@given(st.floats(1.55, 4.0), st.sets(st.sampled_from(WORKERS), min_size=3), seeds)
def test_most_or_all_workers_that_become_slow_are_found_by_their_own_first_steps(factor, slow, seed):
    """If three of four workers are slow, the medians of their peers show nothing."""
    slowness, rng = job(), random.Random(seed)
    assert run(slowness, rng, FIRST + 20) == []
    found = run(slowness, rng, 20, dict.fromkeys(slow, factor))
    assert {of.worker for of in found} == slow and {of.against for of in found} == {"itself"}
    assert all(abs(of.factor / factor - 1) < 0.2 for of in found)
    over = run(slowness, rng, 20)
    assert sorted(over) == [Speed(worker, 1.0, "itself") for worker in sorted(slow)] and not slowness.factors


@few
@given(st.floats(1.55, 4.0), st.sampled_from(WORKERS), seeds)
def test_one_slow_worker_is_found_once_by_its_peers(factor, slow, seed):
    slowness, rng = job(), random.Random(seed)
    run(slowness, rng, FIRST + 20)
    (found,) = run(slowness, rng, 40, {slow: factor})
    assert (found.worker, found.against) == (slow, "peers")
    assert run(slowness, rng, 30) == [Speed(slow, 1.0, "peers")], (
        "the comparison with its own first steps reports nothing"
    )


@few
@given(st.floats(1.0, 1.2), seeds)
def test_noise_and_a_little_heat_make_no_worker_slow(factor, seed):
    slowness, rng = job(), random.Random(seed)
    assert run(slowness, rng, FIRST + 20) + run(slowness, rng, 100, dict.fromkeys(WORKERS, factor)) == []


@few
@given(st.floats(1.0, 3.0), st.floats(1.4, 10.0), seeds)
def test_a_machine_that_becomes_busy_makes_no_worker_slow(factor, waits, seed):
    """Own times grow too, because the caches are lost."""
    slowness, rng = job(), random.Random(seed)
    run(slowness, rng, FIRST + 20)
    assert run(slowness, rng, 100, dict.fromkeys(WORKERS, factor), waits) == []


@few
@given(st.floats(1.55, 4.0), st.floats(1.0, 6.0), seeds)
def test_a_slow_host_is_found_even_if_its_workers_always_wait_for_cores(factor, waits, seed):
    slowness, rng = job(), random.Random(seed)
    run(slowness, rng, FIRST + 20, waits=waits)
    found = run(slowness, rng, 20, dict.fromkeys(WORKERS, factor), waits)
    assert {of.worker for of in found} == set(WORKERS)


def test_a_busy_machine_ends_no_slowness():
    slowness, rng = job(), random.Random(1)
    run(slowness, rng, FIRST + 20)
    assert len(run(slowness, rng, 20, dict.fromkeys(WORKERS, 2.0))) == 4
    assert run(slowness, rng, 50, waits=3.0) == [] and len(slowness.factors) == 4


def test_fourteen_slow_steps_of_twenty_are_too_few():
    slowness, rng = job(), random.Random(1)
    run(slowness, rng, FIRST)
    for _ in range(5):
        assert run(slowness, rng, 14, dict.fromkeys(WORKERS, 3.0)) + run(slowness, rng, 6) == []


@few
@given(st.integers(1, FIRST - 1))
def test_before_a_hundred_steps_nothing_is_compared(steps):
    drift = Drift()
    for n in range(FIRST):
        drift.add(1.0 if n < steps else 5.0, 5.0)
    assert not drift.slow and drift.factor == 1.0


def test_a_new_process_on_the_same_machine_is_compared_with_the_first_steps_of_the_old_process():
    slowness, rng = job(), random.Random(1)
    hot = partial(run, slowness, rng, slow=dict.fromkeys(WORKERS, 2.0))
    run(slowness, rng, FIRST + 20)
    assert len(hot(20)) == 4
    assert slowness.place(WORKERS[0], "here", 8) and hot(30) == [] and WORKERS[0] in slowness.factors


def test_a_new_process_on_another_machine_is_compared_with_its_peers():
    slowness, rng = job(), random.Random(1)
    hot = dict.fromkeys(WORKERS, 2.0)
    run(slowness, rng, FIRST + 20)
    assert len(run(slowness, rng, 20, hot)) == 4
    assert not slowness.place(WORKERS[0], "there", 8)
    assert run(slowness, rng, 30, hot | {WORKERS[0]: 1.0}) == [Speed(WORKERS[0], 1.0, "peers")]
    assert slowness.factors.keys() == {*WORKERS[1:]}
