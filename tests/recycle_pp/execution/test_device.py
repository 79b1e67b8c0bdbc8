"""How a worker chooses its device and backend, partly on simulated machines with GPUs."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from recycle_pp.comm.waiting import Pool
from recycle_pp.config.settings import Settings
from recycle_pp.execution import device, loading
from recycle_pp.execution.activity import Doing
from recycle_pp.execution.device import backend_for, choose, notes, platform
from recycle_pp.numerics import torch_operations as reference
from recycle_pp.numerics.backends import operations

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


@pytest.fixture
def gpus(monkeypatch):
    """A function that simulates a node with the given number of GPUs, and returns the list of GPUs made current."""

    def pretend(count):
        current = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", current.append)
        return current

    monkeypatch.setattr(device.limits, "raise_open_files", lambda: None)
    # This restores the method after the test, because `choose` replaces it.
    monkeypatch.setattr(threading.Thread, "run", threading.Thread.run)
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return pretend


def test_auto_selects_a_gpu_if_there_is_one(gpus):
    current = gpus(2)
    assert choose("auto", 0) == torch.device("cuda", 0)
    assert choose("cuda", 1) == torch.device("cuda", 1)
    assert choose("cpu", 0) == CPU
    assert current == [torch.device("cuda", 0), torch.device("cuda", 1)]


def test_every_thread_of_a_worker_uses_its_gpu(gpus, monkeypatch):
    """By default, CUDA uses GPU 0 in a new thread."""
    gpus(2)
    used = {}
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: used.update({threading.get_ident(): device}))
    chosen = choose("cuda", 1)
    seen = []
    look = lambda: seen.append(used.get(threading.get_ident()))  # noqa: E731
    Pool().start(look).wait()
    thread = threading.Thread(target=look)
    thread.start()
    thread.join(10)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(look).result(10)
    assert seen == [chosen] * 3


def test_workers_share_the_gpus_of_their_node_in_turn(gpus, monkeypatch):
    gpus(2)
    assert [choose("auto", rank).index for rank in range(5)] == [0, 1, 0, 1, 0]
    monkeypatch.setenv("LOCAL_RANK", "1")  # numbered within the node, unlike RANK
    assert choose("auto", 6).index == 1


def test_without_a_gpu_auto_selects_the_cpu_and_cuda_is_rejected(gpus):
    current = gpus(0)
    assert choose("auto", 3) == choose("cpu", 3) == CPU
    with pytest.raises(ValueError, match=r"run\.device=cuda: torch finds no GPU .*; allowed: auto, cpu"):
        choose("cuda", 3)
    assert current == []


@pytest.fixture
def nccl_is(monkeypatch):
    """A function that simulates this version of NCCL; None: not loaded."""
    return lambda version: monkeypatch.setattr(device.nccl, "installed", lambda: version)


def test_auto_selects_tcp_and_explains_how_to_select_nccl(gpus, nccl_is):
    gpus(2)
    nccl_is((2, 29, 7))
    assert [backend_for("auto", each) for each in (CPU, GPU)] == ["tcp", "tcp"]
    assert [backend_for(name, GPU) for name in ("tcp", "gloo", "nccl")] == ["tcp", "gloo", "nccl"]
    (note,) = notes("auto", "tcp", GPU)
    assert "parallel.backend=nccl" in note
    assert notes("auto", "tcp", CPU) == notes("tcp", "tcp", GPU) == []


def test_the_start_prints_the_version_and_the_environment_of_nccl(gpus, nccl_is, monkeypatch):
    nccl_is((2, 30, 7))
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    monkeypatch.setenv("NCCL_MAX_CTAS", "1")
    note, *_ = notes("nccl", "nccl", GPU)
    assert note.startswith("NCCL 2.30.7: ") and "NCCL_NVLS_ENABLE=0" in note and "NCCL_MAX_CTAS=1" in note


def test_the_limits_of_the_system_are_checked_only_if_nccl_is_used(gpus, nccl_is, monkeypatch):
    gpus(2)
    nccl_is((2, 30, 7))

    def refuse():
        raise ValueError("open files")

    monkeypatch.setattr(device.limits, "raise_open_files", refuse)
    monkeypatch.setattr(device.limits, "warnings", lambda: ["/dev/shm"])
    assert backend_for("tcp", GPU) == "tcp" and backend_for("auto", CPU) == "tcp"
    assert notes("tcp", "tcp", GPU) == [] and notes("nccl", "nccl", GPU)[1:] == ["/dev/shm"]
    with pytest.raises(ValueError, match="open files"):
        backend_for("nccl", GPU)


@pytest.mark.parametrize(
    ("version", "enabled", "allowed"),
    [((2, 30, 7), "1", True), ((2, 31, 0), "1", True), ((2, 30, 7), None, False), ((2, 29, 7), "1", False)],
)
def test_workers_may_share_a_gpu_over_nccl_from_2_30_on_if_the_user_enables_it(
    version, enabled, allowed, gpus, nccl_is, monkeypatch
):
    gpus(1)
    nccl_is(version)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    if enabled:
        monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", enabled)
    if allowed:
        assert backend_for("nccl", GPU) == "nccl"
    else:
        says = r"needs a GPU for each worker: this node has 1 GPU for 2 workers; set .*=tcp, or NCCL_MULTI_RANK_GPU"
        with pytest.raises(ValueError, match=says):
            backend_for("nccl", GPU)


def test_nccl_without_a_gpu_or_without_nccl_is_rejected(gpus, nccl_is):
    gpus(2)
    nccl_is(None)
    with pytest.raises(ValueError, match=r"parallel\.backend=nccl needs a GPU"):
        backend_for("nccl", CPU)
    with pytest.raises(ValueError, match=r"parallel\.backend=nccl: libnccl\.so\.2 .* is not installed"):
        backend_for("nccl", GPU)


def test_a_restarted_worker_waits_until_the_driver_has_freed_the_memory_of_the_dead_one(monkeypatch):
    free = iter([10, 10, 30, 60, 60, 90, *[90] * 1000])
    read = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (read.append(next(free)) or read[-1], 100))
    monkeypatch.setattr(device, "SETTLED_SECONDS", 0.2)
    device.settle_memory(GPU)
    assert read[-1] == 90 and len(read) < 20
    device.settle_memory(CPU)


def test_the_device_selects_the_kernels_unless_they_are_set():
    fused = operations("auto", GPU)
    assert fused.__name__ == "recycle_pp.numerics.triton_operations"
    assert operations("triton", CPU) is fused and operations("reference", GPU) is reference is operations("auto", CPU)


def test_the_name_of_a_platform_has_everything_that_the_bits_depend_on(monkeypatch, nccl_is):
    chip = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: chip)
    monkeypatch.setattr(device, "_driver", lambda: "580.95.05")
    monkeypatch.setattr(device, "_cublas", lambda: "130100")
    nccl_is((2, 30, 7))
    here = platform(GPU, "nccl")
    assert here.startswith("NVIDIA H200 sm_90, 132 SMs, driver 580.95.05, cuBLAS 130100, attention flash+")
    assert here.endswith(f", torch {torch.__version__}, nccl 2.30.7")
    assert platform(CPU, "gloo").startswith("cpu ")
    for change in (
        lambda: nccl_is((2, 30, 8)),
        lambda: setattr(chip, "multi_processor_count", 114),
        lambda: monkeypatch.setattr(device, "_driver", lambda: "590.0.1"),
        lambda: monkeypatch.setattr(device, "_cublas", lambda: "130200"),
        lambda: monkeypatch.setattr(torch.backends.cuda, "flash_sdp_enabled", lambda: False),
        lambda: monkeypatch.setattr(torch, "__version__", "2.11.0"),
    ):
        before = platform(GPU, "nccl")
        change()
        assert platform(GPU, "nccl") != before


@pytest.mark.parametrize("precision, named", [("fp32", False), ("bf16", True), ("bf16-autocast", True)])
def test_the_name_of_a_cpu_has_its_bf16_instructions_if_they_compute_products(precision, named, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert (" bf16 amx, " in platform(CPU, "gloo", precision)) is named


@pytest.mark.parametrize(("chosen", "warmed"), [(GPU, ["stage", "optimizer"]), (CPU, [])])
def test_a_worker_compiles_everything_before_it_is_ready(chosen, warmed, monkeypatch):
    done = []

    def fake(name):
        return lambda *arguments: SimpleNamespace(warm=lambda: done.append(name))

    monkeypatch.setattr(loading, "Stage", fake("stage"))
    monkeypatch.setattr(loading, "StageOptimizer", fake("optimizer"))
    loading._stage(Settings(), 0, chosen, "", Doing(), {}, filled=True)
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
large_blocks_apart()
before = held(); pins = use(2 << 20, 20); apart = held() - before
before = held(); pins = use(1 << 17, 200); kept = held() - before
give_back_free_memory(); after = held() - before
print(kept, after, apart)
"""


def test_free_memory_is_returned_to_the_system_on_request():
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    kept, after, apart = map(int, done.stdout.split())
    assert kept > 60 and after < 20  # of 100 MiB
    assert apart < 20
