"""Fixtures of the failure suite."""

import pytest

from .harness import Runs
from .table import RESULTS


def pytest_collection_modifyitems(items):
    """Every case has a bound of its own; its fault-free run comes on top."""
    for item in items:
        if "runs" in getattr(item, "fixturenames", ()) and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def runs(zygote, tmp_path_factory):
    """Runs cases, and fault-free jobs to compare them with, each of those once."""
    return Runs(zygote, tmp_path_factory.mktemp("runs"), RESULTS)
