"""Deaths while workers have launched ops whose completion they have not observed yet."""

from pathlib import Path

import pytest

from recycle_pp.testing.local_cluster import Zygote

from .harness import Case, fails, rejoins
from .test_exactness import some

TWO = fails("3:0.1@backward", "3:1.2@forward")
CASES = [
    Case("two stages and a return", "3x4", TWO + rejoins("6:0.1"), stagger=True, deaths=2, steps=30),
    Case("in sends", "3x4", fails("2:0.1@send", "4:1.0@weight", "6:1.2@vote"), deaths=3),
    Case("no worker dies", "3x4", deaths=0),
]


@pytest.fixture(scope="module")
def late(runs):
    with Zygote(preload=Path(__file__).with_name("late_device.py")) as zygote:
        yield runs.forked_from(zygote)


@pytest.mark.parametrize("case", some(CASES, quick=1))
def test_a_death_among_workers_that_launch_ahead_changes_no_bit(case, late):
    late.check_exact(late.of(case, "launched ahead"))
