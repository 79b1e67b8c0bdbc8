"""Warnings about system limits that NCCL may exceed, and the refusal of limits that it needs."""

import os
import resource
import subprocess
import sys

import pytest

from recycle_pp.comm.nccl import limits

UNLIMITED = resource.RLIM_INFINITY


@pytest.fixture
def system(monkeypatch):
    """A function that fakes the system's limits. It returns a list of the limits that the code sets later."""

    def pretend(free=1 << 30, files=(1024, 65536), locked=UNLIMITED, cards=(), root=False):
        made = []
        about = [*os.statvfs("/")]
        about[4] = free // about[1]  # f_bavail, f_frsize
        monkeypatch.setattr(limits.os, "statvfs", lambda path: os.statvfs_result(about))
        values = {resource.RLIMIT_NOFILE: files, resource.RLIMIT_MEMLOCK: (locked, locked)}
        monkeypatch.setattr(limits.resource, "getrlimit", values.__getitem__)
        monkeypatch.setattr(limits.resource, "setrlimit", lambda what, both: made.append(both))
        listdir = os.listdir
        found = {"/sys/class/infiniband": list(cards)}
        monkeypatch.setattr(limits.os, "listdir", lambda path: found[path] if path in found else listdir(path))
        monkeypatch.setattr(limits, "_may_lock", lambda: root)
        return made

    return pretend


def test_a_roomy_system_needs_no_warning(system):
    system()
    assert limits.warnings() == []


@pytest.mark.parametrize(
    ("about", "beginning", "remedy"),
    [
        ({"free": 64 << 20}, "/dev/shm has 64 MB left, and NCCL may need 256 MB", "--shm-size=1g"),
        ({"files": (1024, 1024)}, "a worker may open 1024 files, and NCCL may need 4096", "ulimit -Hn 4096"),
        ({"locked": 65536, "cards": ["mlx5_0"]}, "a worker may lock 64 kB of memory", "memlock=-1"),
    ],
    ids=["shm", "files", "locked"],
)
def test_a_warning_about_a_small_limit_names_the_remedy(system, about, beginning, remedy):
    system(**about)
    (sentence,) = limits.warnings()
    assert sentence.startswith(beginning) and remedy in sentence


def test_a_missing_dev_shm_counts_as_full(system, monkeypatch):
    system()

    def missing(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr(limits.os, "statvfs", missing)
    (sentence,) = limits.warnings()
    assert sentence.startswith("/dev/shm has 0 MB left")


@pytest.mark.parametrize("about", [{"cards": []}, {"cards": ["mlx5_0"], "root": True}], ids=["no card", "may lock"])
def test_a_limit_of_locked_memory_is_ignored_without_an_infiniband_card_or_with_the_capability(system, about):
    system(locked=65536, **about)
    assert limits.warnings() == []


def test_a_limit_of_locked_memory_is_ignored_if_nccl_may_not_use_the_card(system, monkeypatch):
    system(locked=65536, cards=["mlx5_0"])
    monkeypatch.setenv("NCCL_IB_DISABLE", "1")
    assert limits.warnings() == []


def test_the_soft_limit_of_open_files_is_raised_to_the_hard_limit(system):
    made = system(files=(1024, 65536))
    limits.raise_open_files()
    assert made == [(65536, 65536)]


def test_a_hard_limit_below_the_sockets_of_the_communicators_is_refused(system):
    made = system(files=(16, 16))
    with pytest.raises(ValueError, match=r"needs at least \d+ open files .* limit is 16; raise it to 4096 \(ulimit"):
        limits.raise_open_files()
    assert made == []


def test_limits_of_this_system_are_read_without_torch():
    script = "from recycle_pp.comm.nccl import limits; limits.raise_open_files(); print(limits.warnings())"
    script += "; limits._may_lock(); import sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=50)
