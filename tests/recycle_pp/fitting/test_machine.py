"""`parallel.memory=auto`: the memory of a worker, from that of its machine or GPU."""

from __future__ import annotations

from recycle_pp.fitting import machine


def test_auto_is_a_share_of_the_machine_or_its_gpu(monkeypatch):
    monkeypatch.setattr(machine, "host_memory", lambda: 40e9)
    monkeypatch.setattr(machine, "gpu_memory", lambda: None)
    assert machine.memory_of_a_worker("auto", workers_here=4) == "9 GB"
    monkeypatch.setattr(machine, "gpu_memory", lambda: 80e9)
    assert machine.memory_of_a_worker("auto", workers_here=4) == "72 GB"
    assert machine.memory_of_a_worker("cpu", workers_here=4) == "9 GB"
    monkeypatch.setattr(machine, "host_memory", lambda: None)
    assert machine.memory_of_a_worker("cpu", workers_here=4) is None
