"""Simulated supervisors live in virtual time: a watchdog, which reads the real clock, would end the test's process."""

import pytest

from recycle_pp.supervisor import supervisor


class NoWatchdog:
    def __init__(self, *_: object) -> None:
        pass

    def beat(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def no_watchdog(monkeypatch):
    monkeypatch.setattr(supervisor, "Watchdog", NoWatchdog)
