"""Fixtures of all tests."""

import os

import hypothesis
import pytest

from recycle_pp.testing.local_cluster import Zygote

pytest_plugins = ["tests.failures.table"]


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="also the tests that take minutes (marked slow)")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--full"):
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]


def pytest_xdist_auto_num_workers(config):
    """Two files at a time, in processes of their own; single tests in this one, where -s and --pdb work."""
    if any("::" in argument for argument in config.args) or config.option.keyword:
        config.option.dist = "no"
        return 0
    return 2


@pytest.fixture(scope="session")
def zygote():
    """Forks whole jobs in a second: `with zygote.run(["parallel=2x2", ...]) as job: job.wait(60)`."""
    with Zygote() as process:
        yield process


# In CI the same examples every time: a new counterexample is found by whoever works on the code, not by a bystander.
# No deadlines: how long an example takes says how busy the machine is.
hypothesis.settings.register_profile("ci", derandomize=True, deadline=None)
hypothesis.settings.register_profile("here", deadline=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "here")
