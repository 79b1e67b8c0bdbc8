"""Fixtures of all tests."""

import pytest

from recycle_pp.control.local import Zygote


@pytest.fixture(scope="session")
def zygote():
    """Forks whole jobs in a second: `with zygote.run(["parallel=2x2", ...]) as job: job.wait(60)`."""
    with Zygote() as process:
        yield process
