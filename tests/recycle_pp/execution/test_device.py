"""Which device and which backend a worker takes, on machines with GPUs that are not here."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from recycle_pp.config.settings import Settings
from recycle_pp.execution import worker
from recycle_pp.execution.device import backend_for, choose, platform
from recycle_pp.numerics import torch_operations as reference
from recycle_pp.numerics.backends import operations

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


@pytest.fixture
def gpus(monkeypatch):
    """Call it with the number of GPUs of the node; returns the list of those that became current."""

    def pretend(count):
        current = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", current.append)
        return current

    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return pretend


def test_auto_takes_a_gpu_where_there_is_one(gpus):
    current = gpus(2)
    assert choose("auto", 0) == torch.device("cuda", 0)
    assert choose("cuda", 1) == torch.device("cuda", 1)
    assert choose("cpu", 0) == CPU
    assert current == [torch.device("cuda", 0), torch.device("cuda", 1)]


def test_workers_share_the_gpus_of_their_node_in_turn(gpus, monkeypatch):
    gpus(2)
    assert [choose("auto", rank).index for rank in range(5)] == [0, 1, 0, 1, 0]
    monkeypatch.setenv("LOCAL_RANK", "1")  # the launcher counts on each node, ranks over all
    assert choose("auto", 6).index == 1


def test_without_a_gpu_auto_is_the_cpu_and_cuda_is_refused(gpus):
    current = gpus(0)
    assert choose("auto", 3) == choose("cpu", 3) == CPU
    with pytest.raises(ValueError, match=r"run\.device=cuda needs a GPU, .*; allowed: auto, cpu"):
        choose("cuda", 3)
    assert current == []


def test_the_backend_follows_the_device_unless_it_is_named(gpus):
    gpus(2)
    assert [backend_for("auto", device) for device in (CPU, GPU)] == ["tcp", "nccl"]
    assert [backend_for(name, GPU) for name in ("tcp", "gloo", "nccl")] == ["tcp", "gloo", "nccl"]


def test_workers_that_share_a_gpu_talk_through_the_host(gpus, monkeypatch):
    gpus(2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert [backend_for(name, GPU) for name in ("auto", "tcp", "gloo")] == ["tcp", "tcp", "gloo"]
    with pytest.raises(
        ValueError, match=r"parallel\.backend=nccl needs a GPU for each worker: a node has 2 for 4; allowed: auto"
    ):
        backend_for("nccl", GPU)


def test_kernels_follow_the_device_unless_they_are_named():
    fused = operations("auto", GPU)
    assert fused.__name__ == "recycle_pp.numerics.triton_operations"
    assert operations("triton", CPU) is fused and operations("reference", GPU) is reference is operations("auto", CPU)


def test_a_platform_tells_gpus_and_versions_apart(monkeypatch):
    chip = {"get_device_name": "NVIDIA H200", "get_device_capability": (9, 0)}
    for name, value in chip.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    here = platform(GPU, "nccl")
    assert here.startswith("NVIDIA H200 sm_90, triton 3.") and here.endswith(f", torch {torch.__version__}, nccl")
    assert platform(CPU, "gloo").startswith("cpu ")
    monkeypatch.setattr(torch, "__version__", "2.11.0")
    assert platform(GPU, "nccl") != here


@pytest.mark.parametrize(("device", "warmed"), [(GPU, ["stage", "optimizer"]), (CPU, [])])
def test_a_worker_compiles_everything_before_it_is_ready(device, warmed, monkeypatch):
    done = []

    def fake(name):
        return lambda *arguments: SimpleNamespace(warm=lambda: done.append(name))

    monkeypatch.setattr(worker, "Stage", fake("stage"))
    monkeypatch.setattr(worker, "StageOptimizer", fake("optimizer"))
    worker._stage(Settings(), 0, device, "")
    assert done == warmed


MEMORY = """
import pathlib, torch
from recycle_pp.execution.device import give_back_free_memory, large_blocks_apart
held = lambda: int(pathlib.Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0]) >> 10
def use(elements, count):
    for _ in range(2):  # the second time malloc has learnt to keep blocks of that size
        blocks = [(torch.ones(elements), torch.ones(1000)) for _ in range(count)]
        pins = [pin for _, pin in blocks]  # between the blocks: what is freed there does not go back by itself
        del blocks
    return pins
before = held(); pins = use(1 << 18, 100); kept = held() - before
give_back_free_memory(); after = held() - before
large_blocks_apart(); pins = use(2 << 20, 20); apart = held() - before
print(kept, after, apart)
"""


def test_free_memory_goes_back_to_the_system_when_it_is_told_to():
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    kept, after, apart = map(int, done.stdout.split())
    assert kept > 60 and after < 20  # MiB, of 100
    assert apart < 20
