"""The memory of this machine and of its workers."""

from __future__ import annotations

import pytest

from recycle_pp.fitting import machine
from recycle_pp.fitting.machine import host_memory


def test_auto_is_a_share_of_the_machine_or_its_gpu(monkeypatch):
    monkeypatch.setattr(machine, "host_memory", lambda: 40e9)
    monkeypatch.setattr(machine, "gpu_memory", lambda: None)
    assert machine.memory_of_a_worker("auto", workers_here=4) == "9 GB"
    monkeypatch.setattr(machine, "gpu_memory", lambda: 80e9)
    assert machine.memory_of_a_worker("auto", workers_here=4) == "72 GB"
    assert machine.memory_of_a_worker("cpu", workers_here=4) == "9 GB"
    monkeypatch.setattr(machine, "host_memory", lambda: None)
    assert machine.memory_of_a_worker("cpu", workers_here=4) is None


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
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    for path, text in {proc / "meminfo": "MemTotal: 1000000 kB", proc / "self/cgroup": lines}.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name, text in files.items():
        (groups / name).parent.mkdir(parents=True, exist_ok=True)
        (groups / name).write_text(text)
    assert host_memory(proc, groups) == least
