"""What comes later comes once, or not at all; and a mistake in it is heard of."""

import asyncio

from recycle_pp.coordinator.timers import Timers

from .held_lease import HeldLease


def run(use):
    failures = []

    async def main():
        use(Timers(failures.append, HeldLease()))
        await asyncio.sleep(0.05)

    asyncio.run(main())
    return failures


def test_a_call_comes_unless_it_is_called_off():
    came = []

    def use(timers):
        timers.after(0.0, came.append, "first")
        call_off = timers.after(0.0, came.append, "second")
        call_off()

    assert run(use) == [] and came == ["first"]


def test_nothing_comes_after_the_end():
    came = []

    def use(timers):
        timers.after(0.0, came.append, "late")
        timers.close()

    assert run(use) == [] and came == []


def test_a_mistake_is_not_lost_in_the_event_loop():
    (failure,) = run(lambda timers: timers.after(0.0, lambda: 1 // 0))
    assert "ZeroDivisionError" in failure
