"""Waiting for file descriptors, and the limit of their number."""

import os
import subprocess
import sys

from recycle_pp.linux.descriptors import readable


def test_a_closed_pipe_is_readable_and_an_empty_one_is_not():
    ours, theirs = os.pipe()
    assert not readable(ours) and not readable(ours, 0.05)
    os.close(theirs)
    assert readable(ours)
    os.close(ours)


def test_a_process_and_its_children_may_open_as_many_files_as_the_hard_limit_allows():
    """In a process of its own, because a limit can be lowered only once."""
    script = (
        "import resource, subprocess\n"
        "from recycle_pp.linux.descriptors import raise_limit\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 500))\n"
        "print(raise_limit(), raise_limit(), flush=True)\n"
        "subprocess.run(['sh', '-c', 'ulimit -n'])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["500", "500", "500"]
