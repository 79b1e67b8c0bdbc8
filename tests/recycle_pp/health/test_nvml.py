"""Samples of GPUs, read through NVIDIA's library or, in most of these tests, through a scripted stand-in."""

import json
import sys
import threading
import time
from types import ModuleType

import pytest

from recycle_pp.health.__main__ import main
from recycle_pp.health.host import Host
from recycle_pp.health.nvml import Gpu, MissingPackage
from recycle_pp.health.setup import Pair, Setup
from recycle_pp.health.watch import Watch
from recycle_pp.machine_checks.facts import hardware

STAND_IN = "recycle_pp.testing.scripted_nvml"


@pytest.fixture
def script(tmp_path, monkeypatch):
    """A function that writes the script of two GPUs. Its changes apply at once."""
    monkeypatch.setenv("RECYCLE_NVML", STAND_IN)
    monkeypatch.setenv("RECYCLE_NVML_SCRIPT", str(tmp_path / "script.json"))
    monkeypatch.delitem(sys.modules, STAND_IN, raising=False)

    def write(*changes):
        timeline = [{"step": -1, **change} for change in changes]
        script = {"devices": 2, "metrics": str(tmp_path / "none"), "timeline": timeline}
        (tmp_path / "script.json").write_text(json.dumps(script))

    write()
    return write


def test_a_machine_without_a_driver_has_no_gpu(monkeypatch):
    monkeypatch.delenv("RECYCLE_NVML", raising=False)
    monkeypatch.setattr("recycle_pp.health.nvml.Path.exists", lambda path: False)
    assert Gpu.of(0) is None and Gpu.all() == []


@pytest.mark.parametrize(
    ("package", "problem"),
    [(None, "nvidia-ml-py is not installed"), (ModuleType("pynvml"), "nvidia-ml-py is too old")],
)
def test_gpus_without_the_package_are_reported(monkeypatch, tmp_path, package, problem):
    monkeypatch.delenv("RECYCLE_NVML", raising=False)
    monkeypatch.setattr("recycle_pp.health.nvml.Path.exists", lambda path: True)
    monkeypatch.setitem(sys.modules, "pynvml", package)
    with pytest.raises(MissingPackage, match=problem):
        Gpu.of(0)
    watch = Watch(0, 10.0, "auto", tmp_path / "none", print)
    watch.open()
    (finding,) = watch.once(Host(tmp_path, tmp_path / "none")).findings
    assert finding.action == "note" and problem in finding.detail


def test_the_setup_of_a_gpu_is_read_and_a_lost_gpu_has_none(script):
    script({"device": 0, "generation": 3, "ecc": 0}, {"device": 1, "lost": True})
    first, lost = Gpu.all()
    assert first.setup() == Setup("580.95.05", (13, 0), 3, 5, 16, 16, True, True, False, 18, 0, 600_000_000)
    assert lost.setup().lanes is None and lost.pair(first) == Pair("unknown", None)


def test_a_gpu_that_is_gone_before_the_first_look_is_named(script, tmp_path, capsys):
    script({"device": 1, "gone": 1})
    assert [gpu.uuid for gpu in Gpu.all()] == ["GPU-00000000"] and Gpu.silent() == ["1"]
    assert main([]) == 1 and "[health] KILL lost: GPU 1 does not answer" in capsys.readouterr().out
    assert "GPU 1 does not answer" in hardware().trouble
    watch = Watch(1, 10.0, "auto", tmp_path / "none", print)
    watch.open()
    assert [finding.detail for finding in watch.once(Host(tmp_path, tmp_path / "none")).findings] == [
        "GPU 1 does not answer"
    ]


@pytest.mark.parametrize(
    ("changes", "pair"),
    [
        ({}, Pair("NVLink", True)),
        ({"nvlink": 5, "ancestor": 20}, Pair("several PCIe switches", True)),
        ({"nvlink": 5, "peers": 1}, Pair("the link between CPU sockets", False)),
        ({"nvlink": 5, "ancestor": 99}, Pair("unknown", True)),
    ],
)
def test_the_path_between_two_gpus_is_nvlink_or_their_nearest_common_ancestor(script, changes, pair):
    script({"device": 0, **changes})
    first, second = Gpu.all()
    assert first.pair(second) == pair


def test_a_rank_watches_the_gpu_that_its_worker_uses(script, monkeypatch):
    script()
    assert [Gpu.of(rank).uuid for rank in (0, 1, 2)] == ["GPU-00000000", "GPU-00000001", "GPU-00000000"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,-1,0")
    assert [gpu.uuid for gpu in Gpu.all()] == ["GPU-00000001"], "CUDA stops at the first invalid number"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert Gpu.of(0) is None


@pytest.mark.parametrize(
    ("chosen", "found", "silent"),
    [
        ("GPU-1f3a", ["GPU-1f3a7777"], []),
        ("GPU-1f3a7777,GPU-0", ["GPU-1f3a7777", "GPU-0f3a7777"], []),
        ("GPU-", [], ["GPU-"]),
        ("GPU-9", [], ["GPU-9"]),
    ],
)
def test_a_gpu_may_be_named_by_the_beginning_of_its_uuid(script, monkeypatch, chosen, found, silent):
    assert len(Gpu.all()) == 2  # imports the stand-in
    monkeypatch.setattr(f"{STAND_IN}.nvmlDeviceGetUUID", lambda handle: f"GPU-{handle}f3a7777")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert [gpu.uuid for gpu in Gpu.all()] == found and Gpu.silent() == silent


def test_a_sample_has_the_values_that_the_driver_reports(script):
    script(
        {"device": 0, "recovery": 1, "uncorrected": 3, "remap_failed": 1, "links": 4, "link_errors": 2},
        {"device": 0, "throttle": "HwThermalSlowdown HwPowerBrakeSlowdown", "clock": 900, "xid": 48},
    )
    sample = Gpu.of(0).sample()
    assert (sample.recovery, sample.xids, sample.uncorrected, sample.corrected) == ("GPU_RESET", (48,), 3, 0)
    assert sample.remap_failed and not sample.remap_pending and sample.throttle == {"heat", "power"}
    assert (sample.clock, sample.top_clock, sample.power, sample.links, sample.link_errors) == (900, 1980, 400, 4, 16)
    assert not Gpu.of(0).sample().xids, "an XID is reported once"
    assert Gpu.of(1).sample().recovery == ""


def test_a_software_power_cap_is_not_throttling(script):
    script({"device": 0, "throttle": "SwPowerCap GpuIdle"})
    assert Gpu.of(0).sample().throttle == frozenset()


def test_a_lost_gpu_has_a_sample_too(script):
    gpu = Gpu.of(1)
    script({"device": 1, "lost": True})
    sys.modules[STAND_IN].nvmlInit()
    assert gpu.sample().lost and not Gpu.of(0).sample().lost


def test_a_value_that_the_driver_does_not_support_is_left_out(script, monkeypatch):
    import pynvml

    def unsupported(*_):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    gpu = Gpu.of(0)
    names = ["TotalEccErrors", "RemappedRows", "FieldValues", "NvLinkState", "PowerUsage", "UtilizationRates"]
    for name in names:
        monkeypatch.setattr(f"{STAND_IN}.nvmlDeviceGet{name}", unsupported)
    sample = gpu.sample()
    assert sample.uncorrected is sample.power is sample.links is sample.busy is None
    assert (sample.recovery, sample.temperature) == ("", 55)


def test_xids_are_taken_from_the_kernels_log_if_the_driver_reports_none(script, tmp_path):
    watch = Watch(1, 10.0, "cpu", tmp_path / "none", print)
    watch.open()
    host = Host(tmp_path, tmp_path / "none")
    host.sample = lambda sample=host.sample: (sample(), host.xids.extend([("0000:01:00", 79), ("0000:02:00", 48)]))[0]
    assert not watch.once(host).findings
    watch.gpu._events = None
    (finding,) = watch.once(host).findings
    assert (finding.signal, finding.action, finding.device) == ("xid", "kill", "GPU-00000001")
    assert "48" not in finding.detail, "XID 48 belongs to another GPU"


def test_a_watch_takes_a_sample_at_once_on_request_and_after_an_xid(script, tmp_path):
    arrived, reports = threading.Semaphore(0), []

    def report(message):
        reports.append(message)
        arrived.release()

    def findings():  # without those of the host, whose kernel may report what other tests do to their disks
        return [finding for finding in reports[-1].findings if finding.device != "host"]

    watch = Watch(0, 1000.0, "cpu", tmp_path / "none", report)
    watch.start()
    try:
        assert arrived.acquire(timeout=20)
        watch.look()
        assert arrived.acquire(timeout=20) and not findings()
        script({"device": 0, "xid": 79})
        sys.modules[STAND_IN].nvmlInit()
        assert arrived.acquire(timeout=20)
        assert [finding.action for finding in findings()] == ["kill"]
    finally:
        watch.close()


def test_a_sample_that_hangs_counts_as_silence(script, tmp_path):
    script({"device": 0, "hangs": 3})
    watch = Watch(0, 0.1, "cpu", tmp_path / "none", print)
    watch.start()
    time.sleep(0.5)
    assert watch.silent > 0.4
    watch.close()


def test_the_command_prints_figures_and_findings(script, capsys):
    script({"device": 1, "recovery": 2})
    assert main([]) == 1
    shown = capsys.readouterr().out
    assert "GPU-00000000" in shown and "55 C, 400 W, 1980 MHz, 0 memory errors" in shown
    assert "[health] DRAIN GPU-00000001: recovery: the driver asks for NODE_REBOOT" in shown


def test_a_gpu_in_the_coordinators_quarantine_is_killed_on_a_node_without_the_run_folder(script, tmp_path):
    watch = Watch(1, 10.0, "cpu", tmp_path / "none", print, {"GPU-00000001": "XID 79"})
    watch.open()
    (finding,) = watch.once(Host(tmp_path, tmp_path / "none")).findings
    assert (finding.signal, finding.action) == ("quarantine", "kill") and finding.detail.endswith("none: XID 79")
