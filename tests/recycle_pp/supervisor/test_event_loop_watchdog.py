"""The watchdog ends a process with a blocked event loop, but not one with a busy or paused loop."""

import signal
import subprocess
import sys
import time

import pytest

LOOP = """
import asyncio, time
from recycle_pp.supervisor.event_loop_watchdog import EventLoopWatchdog

async def main():
    watchdog = EventLoopWatchdog(0.5, "rank 3")
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        watchdog.beat()
        await asyncio.sleep(0.05)
    {then}
    print("it continues", flush=True)

asyncio.run(main())
"""
COMPUTES = "end = time.monotonic() + 2\n    while time.monotonic() < end: pass"


def run(then):
    return subprocess.Popen(
        [sys.executable, "-c", LOOP.format(then=then)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(("then", "ends"), [("time.sleep(60)", True), (COMPUTES, False), ("pass", False)])
def test_a_blocked_loop_ends_its_process_and_prints_where_it_was_blocked(then, ends):
    process = run(then)
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 0
    last = errors.splitlines()[-1] if errors else ""
    assert last.startswith("recycle_pp: rank 3 exits: its event loop has been blocked") == ends
    assert ("in main" in errors) == ends and ("it continues" in output) != ends


def test_a_pause_of_the_process_is_not_a_hang():
    process = run("pass")
    time.sleep(0.7)
    process.send_signal(signal.SIGSTOP)
    time.sleep(1.5)
    process.send_signal(signal.SIGCONT)
    output, errors = process.communicate(timeout=30)
    assert "it continues" in output and not errors


END = """
import asyncio, time
from types import SimpleNamespace
from recycle_pp.config.settings import Control, Settings
from recycle_pp.supervisor.heartbeats import Heartbeats

async def main():
    heartbeats = Heartbeats(SimpleNamespace(rank=3, local_rank=0), None)
    heartbeats.begin(Settings(control=Control(suspicion=0.3)))
    await asyncio.sleep(0.1)
    heartbeats.close()
    time.sleep(1.5)
    raise SystemExit(1)

asyncio.run(main())
"""


def test_a_disk_that_blocks_the_end_of_a_supervisor_does_not_change_its_exit_code():
    """Otherwise the watchdog would end the process with exit code 0."""
    done = subprocess.run([sys.executable, "-c", END], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and "blocked" not in done.stderr
