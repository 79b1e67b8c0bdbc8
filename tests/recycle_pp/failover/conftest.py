"""Disables the watchdog: it reads the real clock and would end the test process, as supervisors run in virtual time."""

import pytest

from recycle_pp.supervisor import heartbeats


class NoWatchdog:
    def __init__(self, *_: object) -> None:
        pass

    def beat(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def no_watchdog(monkeypatch):
    monkeypatch.setattr(heartbeats, "EventLoopWatchdog", NoWatchdog)
