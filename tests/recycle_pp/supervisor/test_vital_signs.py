"""Vital signs of a worker's main thread: its activity, the activity's age, whether the thread runs."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from recycle_schedules import KINDS, Worker

from recycle_pp.execution.activity import Doing
from recycle_pp.supervisor.vital_signs import Board, VitalSigns
from recycle_pp.wire.messages.activity import REDUCTION, VALIDATION, Activity

TENSOR = Activity("waits", "tensor", 20, (1, 3), Worker(2, 0))


def test_every_activity_is_read_as_it_was_written():
    board = Board(bytearray(4096))
    assert board.read()[0] == 0
    written = [Activity("works", "F", 20, (0, 0), None, True), TENSOR, Activity("waits", "orders"), Activity()]
    for number, activity in enumerate(written, 1):
        before = time.monotonic()
        board.write(number, activity)
        found, since, read = board.read()
        assert (found, read) == (number, activity) and before <= since <= time.monotonic()


@pytest.mark.parametrize("what", [*KINDS, REDUCTION, VALIDATION])
def test_every_kind_of_op_can_be_written(what):
    board = Board(bytearray(4096))
    board.write(1, Activity("works", what, 20))
    assert board.read()[2].what == what


def test_a_half_written_entry_is_not_read():
    memory = bytearray(4096)
    Board(memory).write(7, TENSOR)
    memory[1024] = 8
    assert Board(memory).read() is None


def watched(code):
    process = subprocess.Popen([sys.executable, "-c", code])
    time.sleep(0.5)
    return process, VitalSigns(process.pid, Board(bytearray(4096)))


@pytest.mark.parametrize(("code", "runs"), [("while True: pass", True), ("import time; time.sleep(60)", False)])
def test_a_running_thread_is_distinguished_from_a_sleeping_one(code, runs):
    process, signs = watched(code)
    try:
        for _ in range(10):
            time.sleep(0.05)
            quiet = signs.sample(0, 1.0).quiet
        assert quiet == 0.0 if runs else quiet > 0.4
    finally:
        process.kill()
        process.wait()


def test_a_suspended_process_is_reported_until_it_continues():
    process, signs = watched("import time; time.sleep(60)")
    try:
        found = []
        for number in (signal.SIGSTOP, signal.SIGCONT):
            process.send_signal(number)
            time.sleep(0.1)
            found.append(signs.sample(0, 1.0).suspended)
        assert found == [True, False]
    finally:
        process.kill()
        process.wait()


def test_a_thread_that_waits_for_a_core_is_delayed_and_a_sleeping_one_is_not():
    """Two processes spin on one core, so each waits for half of the time."""
    core = min(os.sched_getaffinity(0))
    spins = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    sleeping, signs_of_sleep = watched("import time; time.sleep(60)")
    (one, signs), (other, _) = watched(spins), watched(spins)
    try:
        for each in (signs, signs_of_sleep):
            each.sample(0, 1.0)
        time.sleep(1.0)
        assert signs.sample(0, 2.0).delayed > 0.25
        assert signs_of_sleep.sample(0, 2.0).delayed < 0.1
    finally:
        for process in (sleeping, one, other):
            process.kill()
            process.wait()


def test_a_pause_of_the_supervisor_does_not_age_activities():
    board = Board(bytearray(4096))
    signs = VitalSigns(os.getpid(), board)
    board.write(1, TENSOR)
    signs.sample(0, 0.2)
    time.sleep(1.0)
    assert signs.sample(0, 0.2).seconds < 0.4


def test_the_age_of_a_new_activity_is_counted_from_its_start():
    board = Board(bytearray(4096))
    signs = VitalSigns(os.getpid(), board)
    time.sleep(0.2)
    board.write(1, TENSOR)
    time.sleep(0.1)
    assert 0.1 <= signs.sample(0, 1.0).seconds < 0.2
    time.sleep(0.1)
    assert 0.2 <= signs.sample(0, 1.0).seconds < 0.4


def test_an_op_is_marked_as_the_first_of_its_kind_until_one_is_done():
    board = Board(bytearray(4096))
    doing, firsts = Doing(board), []
    for what in ("data", "F", "data", "F", "I"):
        doing.works(what, 0)
        firsts.append(board.read()[2].first)
    assert firsts == [False, True, False, False, True], "reading data compiles nothing"


def test_another_thread_can_check_whether_the_awaited_message_has_arrived():
    doing, here = Doing(), threading.Event()
    doing.waits("tensor", 3, (0, 1), Worker(0, 0), here.is_set)
    assert doing.delivered() is None
    here.set()
    assert doing.delivered() == 1
    doing.works("F", 3)
    assert doing.delivered() is None


def test_recording_an_activity_takes_a_few_microseconds():
    doing, count = Doing(), 5000
    best = min(_seconds(lambda: doing.works("F", 3, (1, 2)), count) for _ in range(5))
    assert best / count < 10e-6


def _seconds(function, count):
    begun = time.thread_time()
    for _ in range(count):
        function()
    return time.thread_time() - begun
