"""A loop that stands still ends its process; one that is only busy, or was paused, does not."""

import signal
import subprocess
import sys
import time

import pytest

LOOP = """
import asyncio, time
from recycle_pp.supervisor.watchdog import Watchdog

async def main():
    watchdog = Watchdog(0.5, "rank 3")
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        watchdog.beat()
        await asyncio.sleep(0.05)
    {then}
    print("it goes on", flush=True)

asyncio.run(main())
"""
COMPUTES = "end = time.monotonic() + 2\n    while time.monotonic() < end: pass"


def run(then):
    return subprocess.Popen(
        [sys.executable, "-c", LOOP.format(then=then)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(("then", "ends"), [("time.sleep(60)", True), (COMPUTES, False), ("pass", False)])
def test_a_loop_that_stands_still_ends_its_process_and_says_where_it_stood(then, ends):
    process = run(then)
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 0
    assert ("rank 3 exits: its event loop has been blocked" in errors) == ends
    assert ("in main" in errors) == ends and ("it goes on" in output) != ends


def test_a_pause_of_the_process_is_no_hang():
    process = run("pass")
    time.sleep(0.7)
    process.send_signal(signal.SIGSTOP)
    time.sleep(1.5)
    process.send_signal(signal.SIGCONT)
    output, errors = process.communicate(timeout=30)
    assert "it goes on" in output and not errors
