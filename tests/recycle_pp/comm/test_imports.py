"""Imports have no side effects: tests fork workers from a process that has imported everything."""

import subprocess
import sys

SCRIPT = """
import os, threading, torch, torch.distributed
before = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
import recycle_pp.comm.replay_log, recycle_pp.comm.links, recycle_pp.comm.transfer
import recycle_pp.comm.torch_backend.process_group, recycle_pp.execution.transports
assert before == (len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")))
assert threading.active_count() == 1
"""


def test_imports_start_no_thread_and_open_no_file():
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=120)
