"""Fixtures for the tests of communication."""

import resource

import pytest

from .fake_nccl import fake_links


@pytest.fixture
def fake(monkeypatch):
    """Links over fake NCCL groups (see `fake_links`)."""
    return fake_links(monkeypatch)


@pytest.fixture
def descriptors():
    """Raises the limit of open files to 4,000, enough for both ends of a thousand connections (usual limit: 1,024)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = soft == resource.RLIM_INFINITY or soft >= 4000
    if not enough and hard != resource.RLIM_INFINITY and hard < 4000:
        pytest.skip(f"needs 4,000 open files; the hard limit is {hard}")
    if not enough:
        resource.setrlimit(resource.RLIMIT_NOFILE, (4000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
