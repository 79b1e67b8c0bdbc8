"""Fixtures of the tests of groups."""

import pytest

from .fake_nccl import fake_links


@pytest.fixture
def fake(monkeypatch):
    """See fake_links."""
    return fake_links(monkeypatch)
