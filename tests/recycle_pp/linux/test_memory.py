"""Memory of the machine and of its control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from recycle_pp.linux.memory import free_memory, host_memory, oom_kills


@pytest.mark.parametrize(
    ("lines", "files", "least"),
    [
        ("0::/", {"memory.max": "5000000"}, 5e6),
        ("0::/a/b", {"a/b/memory.max": "max", "a/memory.max": "7000000"}, 7e6),
        ("4:memory:/job\n3:cpuset:/", {"memory/job/memory.limit_in_bytes": "6000000"}, 6e6),
        ("0::/gone", {"memory.max": "8000000"}, 8e6),  # a container that sees its group as the root
        ("0::/", {}, 1024 * 1e6),
        ("0::/", {"memory.max": "max"}, 1024 * 1e6),
    ],
)
def test_control_groups_limit_the_memory_of_the_host(tmp_path, lines, files, least):
    assert host_memory(*machine(tmp_path, lines, files)) == least


@pytest.mark.parametrize(
    ("lines", "files", "free"),
    [
        ("0::/", {"memory.max": "5000", "memory.current": "1000"}, 4000),
        ("0::/a", {"a/memory.max": "max", "a/memory.current": "1", "memory.max": "9", "memory.current": "2"}, 7),
        ("0::/a", {"a/memory.max": "9000000000", "a/memory.current": "1"}, 1024 * 5e5),
        ("4:memory:/", {"memory/memory.limit_in_bytes": "5", "memory/memory.usage_in_bytes": "4"}, 1024 * 5e5),
    ],
)
def test_free_memory_is_limited_by_the_fullest_control_group(tmp_path, lines, files, free):
    assert free_memory(*machine(tmp_path, lines, files)) == free


def test_memory_is_unknown_without_proc(tmp_path):
    assert host_memory(tmp_path, tmp_path) is None and free_memory(tmp_path, tmp_path) is None


@pytest.mark.parametrize(
    ("lines", "files", "killed"),
    [
        ("4:memory:/b\n0::/a", {"a/memory.events": "low 0\noom_kill 3", "memory.events": "oom_kill 7"}, 3),
        ("0::/gone", {"memory.events": "oom_kill 2"}, 2),  # a container that sees its group as the root
        ("0::/", {}, 0),
    ],
)
def test_oom_kills_are_counted_in_the_processs_control_group(tmp_path, lines, files, killed):
    assert oom_kills(*machine(tmp_path, lines, files)) == killed


def machine(folder: Path, lines: str, files: dict[str, str]) -> tuple[Path, Path]:
    """Makes folders like /proc and /sys/fs/cgroup of a process in these groups. Returns both."""
    proc, groups = folder / "proc", folder / "groups"
    meminfo = "MemTotal: 1000000 kB\nMemFree: 1 kB\nMemAvailable: 500000 kB"
    texts = {proc / "meminfo": meminfo, proc / "self/cgroup": lines}
    texts |= {groups / name: text for name, text in files.items()}
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return proc, groups
