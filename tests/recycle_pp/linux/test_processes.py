"""Facts about processes, read from /proc."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

from recycle_pp.linux.processes import children_of, memory_of, parent_of, process_size, process_stat


def test_the_stat_of_a_process_distinguishes_it_from_a_zombie_and_a_later_process():
    began = process_stat(os.getpid()).started
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    zombie = process_stat(child.pid)
    assert zombie.ended and zombie.started >= began and not process_stat(os.getpid()).ended
    child.wait()
    assert process_stat(child.pid) is None


def test_the_ticks_of_a_thread_exclude_those_of_other_threads():
    before, thread = process_stat(os.getpid(), os.getpid()).cpu_ticks, threading.Thread(target=spin)
    thread.start()
    thread.join()
    after = process_stat(os.getpid(), os.getpid()).cpu_ticks
    assert process_stat(os.getpid()).cpu_ticks >= 20 and after - before < 15


def spin() -> None:
    while time.thread_time() < 0.3:
        pass


def test_the_size_of_a_process_counts_its_threads_and_descriptors():
    before = process_size(os.getpid())
    reader, writer = os.pipe()
    assert process_size(os.getpid()).descriptors == before.descriptors + 2
    os.close(reader), os.close(writer)
    assert before.mib > 5 and before.threads >= 1 and parent_of(os.getpid()) == os.getppid()


def test_memory_of_returns_bytes():
    peak, now = memory_of("VmHWM"), memory_of("VmRSS")
    assert peak > 0.9 * now > 2**20, "the kernel counts pages per core, so the peak may lag by a few MiB"


def test_parents_and_children_name_each_other():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert parent_of(child.pid) == os.getpid() and child.pid in children_of(os.getpid())
    child.communicate(b"\n")
    assert child.pid not in children_of(os.getpid()) and children_of(child.pid) == []
