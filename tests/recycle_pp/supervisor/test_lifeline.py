"""A death is detected before the kernel has cleaned up the process."""

import os
import select
import signal
import threading
import time

import pytest

from recycle_pp.supervisor.lifeline import Lifeline


@pytest.fixture
def line():
    line = Lifeline.create()
    yield line
    line.close()


def forked(play):
    """Forks a child that runs `play` and exits. Returns its pid."""
    pid = os.fork()
    if pid == 0:
        play()
        os._exit(0)
    return pid


def holding(line, play=signal.pause):
    """Forks a child that holds the line and runs `play`. Returns its pid."""
    ready, is_ready = os.pipe()

    def hold():
        Lifeline(line.descriptor).hold()
        os.write(is_ready, b"!")
        play()

    pid = forked(hold)
    os.read(ready, 1)
    os.close(ready), os.close(is_ready)
    return pid


def test_the_death_of_a_killed_holder_is_known_before_its_pidfd_is_readable(line):
    pid = holding(line, lambda: bytearray(200 << 20) and signal.pause())
    pidfd = os.pidfd_open(pid)
    time.sleep(0.3)
    seen = []
    thread = threading.Thread(target=lambda: seen.append((line.wait(), select.select([pidfd], [], [], 0)[0])))
    thread.start()
    os.kill(pid, signal.SIGKILL)
    thread.join(5.0)
    os.waitpid(pid, 0)
    os.close(pidfd)
    assert seen == [(True, [])]


def test_the_death_of_a_holder_that_exits_is_detected(line):
    pid = holding(line, lambda: None)
    assert line.wait()
    os.waitpid(pid, 0)


def test_a_wait_may_start_before_the_line_is_held(line):
    threading.Timer(0.1, lambda: pids.append(holding(line, lambda: time.sleep(0.2)))).start()
    pids = []
    assert line.wait()
    os.waitpid(pids[0], 0)


def test_a_child_of_the_holder_is_not_the_holder(line):
    pid = holding(line, lambda: (os.waitpid(forked(lambda: None), 0), signal.pause()))
    waiting = threading.Thread(target=line.wait)
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()
    os.kill(pid, signal.SIGKILL)
    waiting.join(5.0)
    assert not waiting.is_alive()
    os.waitpid(pid, 0)


def test_closing_a_line_that_was_never_held_ends_the_wait():
    line = Lifeline.create()
    waits = []
    thread = threading.Thread(target=lambda: waits.append(line.wait()))
    thread.start()
    line.close()
    thread.join(5.0)
    assert waits == [False]
