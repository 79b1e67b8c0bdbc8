"""Disables parts that do not run in virtual time: the watchdog, which would end the test process, and disk files."""

import pytest

from recycle_pp.supervisor import heartbeats, supervisor


class NoWatchdog:
    def __init__(self, *_: object) -> None:
        pass

    def beat(self) -> None:
        pass

    def close(self) -> None:
        pass


class NoLog:
    def __init__(self, *_: object) -> None:
        pass

    def write(self, *_: object) -> None:
        pass

    def flush(self) -> None:
        pass


@pytest.fixture(autouse=True)
def in_virtual_time(monkeypatch):
    monkeypatch.setattr(heartbeats, "EventLoopWatchdog", NoWatchdog)
    monkeypatch.setattr(supervisor, "ContactLog", NoLog)
