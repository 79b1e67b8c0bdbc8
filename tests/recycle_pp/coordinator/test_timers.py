"""Delayed calls run once or not at all, and their errors are reported."""

import asyncio
from types import SimpleNamespace

from recycle_pp.coordinator.lifecycle import Lifecycle
from recycle_pp.coordinator.timers import Timers

from .held_lease import HeldLease


def run(use):
    """Runs `use` with timers. Returns the reason why the job stops, if it stops."""
    lifecycle = Lifecycle([], SimpleNamespace(stopped=lambda reason: None, release=lambda: None))

    async def main():
        use(Timers(lifecycle, HeldLease()))
        await asyncio.sleep(0.05)

    asyncio.run(main())
    return lifecycle.reason


def test_a_call_runs_unless_it_is_cancelled():
    came = []

    def use(timers):
        timers.after(0.0, came.append, "first")
        call_off = timers.after(0.0, came.append, "second")
        call_off()

    assert run(use) == "" and came == ["first"]


def test_no_call_runs_after_the_end():
    came = []

    def use(timers):
        timers.after(0.0, came.append, "late")
        timers.close()

    assert run(use) == "" and came == []


def test_an_exception_is_not_lost_in_the_event_loop():
    assert "ZeroDivisionError" in run(lambda timers: timers.after(0.0, lambda: 1 // 0))
