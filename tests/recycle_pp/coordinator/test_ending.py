"""When the next time-based checkpoint is due."""

from types import SimpleNamespace

import pytest

from recycle_pp.config.settings import Settings
from recycle_pp.coordinator import ending
from recycle_pp.coordinator.ending import Ending


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(ending, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_a_checkpoint_is_due_some_minutes_after_the_last_one(clock):
    run = Ending(Settings(), recorder=None)
    clock[0] += 599.0
    assert not run.save_due
    clock[0] += 2.0
    assert run.save_due
    run.committed(saves=True, skipped=False)
    assert not run.save_due


def test_a_requested_checkpoint_is_due_until_it_begins(clock):
    run = Ending(Settings(), recorder=None)
    run.save_asked = True
    assert run.save_due
    run.committed(saves=False, skipped=False)
    assert run.save_due
    run.committed(saves=True, skipped=False)
    assert not run.save_due


def test_a_skipped_checkpoint_is_not_due_again_at_every_step(clock):
    run = Ending(Settings(), recorder=None)
    clock[0] += 601.0
    run.committed(saves=False, skipped=True)
    clock[0] += 10.0
    assert not run.save_due
    clock[0] += 591.0
    assert run.save_due


def test_after_a_signal_the_time_until_the_end_runs(clock):
    run = Ending(Settings(), recorder=None)
    assert run.left is None
    run.request("SIGTERM", 143)
    clock[0] += 2.0
    run.request("SIGINT", 130)
    assert run.left == ending.END_SECONDS - 2.0
    clock[0] += 100.0
    assert run.left == 0.0
