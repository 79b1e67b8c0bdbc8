"""Fixtures of the failure suite."""

from pathlib import Path

import pytest

from recycle_pp.testing.local_cluster import Zygote

from .harness import Runs
from .table import RESULTS


def pytest_collection_modifyitems(items):
    """Extends the time limit of tests that run cases, as a case has its own bound and may need a fault-free run."""
    for item in items:
        if "runs" in getattr(item, "fixturenames", ()) and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def runs(zygote, shared_folder):
    """Runs cases. Each fault-free job that cases are compared with runs only once."""
    return Runs(zygote, RESULTS, shared_folder)


@pytest.fixture(scope="session")
def sabotaged(runs):
    """Runs cases whose processes have the failure that RECYCLE_SABOTAGE describes (see `sabotage.py`)."""
    with Zygote(preload=Path(__file__).with_name("sabotage.py")) as zygote:
        yield runs.forked_from(zygote)
