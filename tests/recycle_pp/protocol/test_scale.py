"""What the coordinator itself computes stays small where the job is large; bench/coordinator.py has the figures."""

import importlib.util
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[3] / "bench" / "coordinator.py"


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("bench_coordinator", BENCH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_death_among_128_workers_takes_the_coordinator_a_fraction_of_a_second(bench):
    """Some 30 ms on a quiet core. Lists of actions made one by one took 3 s, and more than linearly so."""
    seconds = bench.one_death(16, 8, 64, at=0.5)
    assert sum(seconds[phase] for phase in ("announce", "hear", "adopt")) < 1.0
    assert seconds["follow"] < 1.0


def test_the_votes_of_128_workers_take_the_coordinator_a_fraction_of_a_second(bench):
    """Some 6 ms on a quiet core."""
    assert bench.one_step(16, 8, 64)["vote"] < 0.2
