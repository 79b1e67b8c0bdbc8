"""`parallel.memory=auto`: the memory of a worker, from that of its machine or GPU."""

from __future__ import annotations

import pytest

from recycle_pp.fitting import machine


def test_auto_is_a_share_of_the_machine_or_its_gpu(monkeypatch):
    monkeypatch.setattr(machine, "host_memory", lambda: 40e9)
    monkeypatch.setattr(machine, "gpus", list)
    assert machine.memory_of_a_worker("auto", workers_here=4) == "9 GB"
    monkeypatch.setattr(machine, "gpus", lambda: [80e9] * 4)
    assert machine.memory_of_a_worker("auto", workers_here=4) == "72 GB"
    assert machine.memory_of_a_worker("cpu", workers_here=4) == "9 GB"
    monkeypatch.setattr(machine, "host_memory", lambda: None)
    assert machine.memory_of_a_worker("cpu", workers_here=4) is None


def test_workers_share_the_smallest_gpu_if_there_are_more_workers_than_gpus(monkeypatch):
    monkeypatch.setattr(machine, "gpus", lambda: [80e9, 40e9])
    assert [machine.gpu_memory(workers) for workers in (1, 2, 3, 4, 5)] == [40e9, 40e9, 20e9, 20e9, 40e9 / 3]


@pytest.mark.parametrize(
    ("chosen", "found"),
    [
        (None, [40, 80, 24]),
        ("2,0", [24, 40]),
        ("GPU-bb,0", [80, 40]),
        ("1,7,0", [80]),
        ("GPU-", []),
        ("MIG-aa11", [24]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
    ],
)
def test_only_gpus_that_cuda_visible_devices_names_are_used(monkeypatch, tmp_path, chosen, found):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU-aa11, 40\nGPU-bb22, 80\nGPU-cc33, 24'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert machine.gpus() == [size * 2**20 for size in found]
