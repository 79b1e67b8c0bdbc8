"""Samples of GPUs, read through NVIDIA's library, or through its stand-in."""

import json
import sys
import threading
import time

import pytest

from recycle_pp.health.__main__ import main
from recycle_pp.health.host import Host
from recycle_pp.health.nvml import Gpu, MissingPackage
from recycle_pp.health.watch import Watch

STAND_IN = "recycle_pp.testing.scripted_nvml"


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Writes the script of two GPUs, whose changes apply at once."""
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


def test_gpus_without_the_package_are_reported(monkeypatch, tmp_path):
    monkeypatch.delenv("RECYCLE_NVML", raising=False)
    monkeypatch.setattr("recycle_pp.health.nvml.Path.exists", lambda path: True)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(MissingPackage):
        Gpu.of(0)
    watch = Watch(0, 10.0, "auto", tmp_path / "none", print)
    watch.open()
    (finding,) = watch.once(Host(tmp_path, tmp_path / "none")).findings
    assert finding.action == "note" and "nvidia-ml-py is not installed" in finding.detail


def test_a_rank_watches_the_gpu_that_its_worker_uses(script, monkeypatch):
    script()
    assert [Gpu.of(rank).uuid for rank in (0, 1, 2)] == ["GPU-00000000", "GPU-00000001", "GPU-00000000"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,-1,0")
    assert [gpu.uuid for gpu in Gpu.all()] == ["GPU-00000001"], "CUDA stops at the first invalid number"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert Gpu.of(0) is None


def test_a_sample_has_what_the_driver_reports(script):
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


def test_a_software_power_cap_is_no_throttling(script):
    script({"device": 0, "throttle": "SwPowerCap GpuIdle"})
    assert Gpu.of(0).sample().throttle == frozenset()


def test_a_lost_gpu_is_a_sample_too(script):
    gpu = Gpu.of(1)
    script({"device": 1, "lost": True})
    sys.modules[STAND_IN].nvmlInit()
    assert gpu.sample().lost and not Gpu.of(0).sample().lost


def test_a_question_that_the_driver_does_not_answer_is_left_out(script, monkeypatch):
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


def test_xids_of_the_kernels_log_count_where_the_driver_reports_none(script, tmp_path):
    watch = Watch(1, 10.0, "cpu", tmp_path / "none", print)
    watch.open()
    host = Host(tmp_path, tmp_path / "none")
    host.sample = lambda sample=host.sample: (sample(), host.xids.extend([("0000:01:00", 79), ("0000:02:00", 48)]))[0]
    assert not watch.once(host).findings
    watch.gpu._events = None
    (finding,) = watch.once(host).findings
    assert (finding.signal, finding.action, finding.device) == ("xid", "kill", "GPU-00000001")
    assert "48" not in finding.detail, "of another GPU"


def test_a_watch_looks_at_once_when_asked_and_an_xid_wakes_it(script, tmp_path):
    arrived, reports = threading.Semaphore(0), []

    def report(message):
        reports.append(message)
        arrived.release()

    watch = Watch(0, 1000.0, "cpu", tmp_path / "none", report)
    watch.start()
    try:
        assert arrived.acquire(timeout=20)
        watch.look()
        assert arrived.acquire(timeout=20) and not reports[-1].findings
        script({"device": 0, "xid": 79})
        sys.modules[STAND_IN].nvmlInit()
        assert arrived.acquire(timeout=20)
        assert [finding.action for finding in reports[-1].findings] == ["kill"]
    finally:
        watch.close()


def test_a_look_that_hangs_is_silence(script, tmp_path):
    script({"device": 0, "hangs": 3})
    watch = Watch(0, 0.1, "cpu", tmp_path / "none", print)
    watch.start()
    time.sleep(0.5)
    assert watch.silent > 0.4
    watch.close()


def test_one_look_at_a_machine_prints_figures_and_findings(script, capsys):
    script({"device": 1, "recovery": 2})
    assert main([]) == 1
    shown = capsys.readouterr().out
    assert "GPU-00000000" in shown and "55 C, 400 W, 1980 MHz, 0 memory errors" in shown
    assert "[health] DRAIN GPU-00000001: recovery: the driver asks for NODE_REBOOT" in shown
