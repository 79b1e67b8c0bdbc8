"""What the start says of parameters and memory."""

from __future__ import annotations

import pytest

from recycle_pp.coordinator.footprint import footprint, needs_of
from recycle_pp.coordinator.machine import host_memory

from ..in_process import small


def test_the_start_says_it_in_sentences(monkeypatch):
    monkeypatch.setattr("recycle_pp.coordinator.footprint.host_memory", lambda: 1e6)
    settings = small(run__device="cpu")
    first, second, third = footprint(settings, workers_here=2)
    assert "parameters in 2 stages; each step: 8 samples, 128 tokens" in first
    assert second.startswith("a worker of stage 0, the fullest, holds about")
    assert all(name in second for name in needs_of(settings, "cpu")[0])
    assert third.startswith("the 2 workers of this machine, torch included, may need 62") and third.endswith(
        "it has 1 MB: that is not enough"
    )


def test_fewer_micro_batches_in_flight_take_less_than_more_do():
    wide = {"model__sequence": 512, "parallel__microbatch_size": 8}
    most = [needs_of(small(**wide, schedule__memory_extra=extra), "cpu")[1]["activations"] for extra in (0, 2)]
    assert most[1] > 1.5 * most[0]


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
def test_the_host_has_what_its_control_groups_leave(tmp_path, lines, files, least):
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    for path, text in {proc / "meminfo": "MemTotal: 1000000 kB", proc / "self/cgroup": lines}.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name, text in files.items():
        (groups / name).parent.mkdir(parents=True, exist_ok=True)
        (groups / name).write_text(text)
    assert host_memory(proc, groups) == least
