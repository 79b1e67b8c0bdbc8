"""Fixtures of all tests."""

import os

import hypothesis
import pytest

from recycle_pp.control.local import Zygote


@pytest.fixture(scope="session")
def zygote():
    """Forks whole jobs in a second: `with zygote.run(["parallel=2x2", ...]) as job: job.wait(60)`."""
    with Zygote() as process:
        yield process


# In CI the same examples every time: a new counterexample is found by whoever works on the code, not by a bystander.
hypothesis.settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    hypothesis.settings.load_profile("ci")
