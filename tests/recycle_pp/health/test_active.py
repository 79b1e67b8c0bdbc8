"""Exercises of devices report wrong results, low rates, and processes that fail or hang as findings."""

import subprocess
import sys
import time

import pytest

from recycle_pp.health import active
from recycle_pp.health.__main__ import main
from recycle_pp.health.active import Exercise, judge
from recycle_pp.health.host import HOST

WELL = Exercise("products", "FLOP/s", 400e12, 400e12, 400e12, 100, 0, "abc")


def changed(**values):
    fields = {name: getattr(WELL, name) for name in WELL.__struct_fields__}
    return Exercise(**(fields | values))


@pytest.mark.parametrize(
    ("bad", "action", "words"),
    [
        (changed(wrong=1), "drain", "1 of 100 results were wrong"),
        (changed(digest="abd"), "drain", "differs from that of the other devices"),
        (changed(rate=350e12), "note", "3.5e+14 FLOP/s, 1.1 times less than the median"),
        (changed(last=310e12), "note", "3.1e+14 FLOP/s at the end, 4e+14 at the beginning"),
    ],
)
def test_a_device_that_differs_from_the_others_is_found(bad, action, words):
    (finding,) = judge({"GPU-0": [WELL], "GPU-1": [bad], "GPU-2": [WELL]}, {})
    assert (finding.device, finding.signal, finding.action) == ("GPU-1", "products", action)
    assert words in finding.detail


def test_of_two_devices_that_differ_neither_is_drained():
    (finding,) = judge({"GPU-0": [WELL], "GPU-1": [changed(digest="abd")]}, {})
    assert finding.action == "note"


def test_usual_differences_are_not_reported():
    assert not judge({"GPU-0": [WELL], "GPU-1": [changed(rate=370e12, last=330e12)]}, {})
    assert not judge({HOST: [WELL]}, {}) and not judge({HOST: []}, {})


def test_devices_of_different_kinds_are_not_compared():
    kinds = {"GPU-0": "H100", "GPU-1": "A100", "GPU-2": "H100", "GPU-3": "A100"}
    slow = changed(rate=100e12, first=100e12, last=100e12, digest="abd")
    results = {"GPU-0": [WELL], "GPU-1": [slow], "GPU-2": [WELL], "GPU-3": [slow]}
    assert not judge(results, kinds)
    (finding,) = judge(results | {"GPU-3": [changed(rate=100e12, first=100e12, last=100e12)]}, kinds)
    assert (finding.device, finding.action) == ("GPU-3", "note")


def played_by(monkeypatch, script):
    """Makes the process that exercises a device run this script instead."""
    popen = active.subprocess.Popen
    monkeypatch.setattr(active.subprocess, "Popen", lambda command, **how: popen([sys.executable, "-c", script], **how))


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("raise RuntimeError('CUDA error: unspecified launch failure')", "RuntimeError: CUDA error"),
        ("import os; os._exit(7)", "exit code 7"),
        ("import time; time.sleep(600)", "it did not end in time"),
    ],
)
def test_a_device_whose_process_fails_or_hangs_should_be_drained(monkeypatch, script, words):
    played_by(monkeypatch, script)
    monkeypatch.setattr(active, "START_SECONDS", 1.5 if "sleep" in script else 60.0)
    results, (finding,) = active.exercise({"GPU-7": "a GPU"}, 0.0)
    assert results == {"GPU-7": []} and (finding.device, finding.action) == ("GPU-7", "drain")
    assert words in finding.detail


def test_devices_whose_processes_cannot_be_killed_are_reported_within_one_time_limit(monkeypatch):
    hung = []
    monkeypatch.setattr(subprocess.Popen, "kill", lambda process: hung.append(process))
    played_by(monkeypatch, "import time; time.sleep(30)")
    monkeypatch.setattr(active, "START_SECONDS", 2.0)
    monkeypatch.setattr(active, "KILL_SECONDS", 0.5)
    begun = time.monotonic()
    _, findings = active.exercise(dict.fromkeys(("GPU-7", "GPU-8"), "a GPU"), 0.0)
    assert time.monotonic() - begun < 4.5
    assert all("cannot be killed" in finding.detail for finding in findings) and len(findings) == 2
    monkeypatch.undo()
    for process in hung:
        process.kill()
        process.communicate()


def test_a_gpu_that_cuda_cannot_use_should_be_drained_unless_it_is_scripted(monkeypatch):
    monkeypatch.delenv("RECYCLE_NVML", raising=False)
    results, (finding,) = active.exercise({"GPU-7": "a GPU"}, 0.0)
    assert results == {"GPU-7": []} and finding.action == "drain"
    assert "CUDA" in finding.detail or "NVIDIA" in finding.detail
    monkeypatch.setenv("RECYCLE_NVML", "recycle_pp.testing.scripted_nvml")
    results, findings = active.exercise({"GPU-7": "a GPU"}, 0.0)
    assert len(results["GPU-7"]) == 4 and "exercise" not in [finding.signal for finding in findings]


def test_each_process_sees_only_its_gpu(monkeypatch):
    line = '{"name": "%s", "unit": "B/s", "rate": 1, "first": 1, "last": 1, "tries": 5, "wrong": 0}'
    played_by(monkeypatch, f"import os; print('{line}' % os.environ['CUDA_VISIBLE_DEVICES'])")
    results, findings = active.exercise(dict.fromkeys(("GPU-7", "GPU-8"), "a GPU"), 0.0)
    assert {device: of[0].name for device, of in results.items()} == {"GPU-7": "GPU-7", "GPU-8": "GPU-8"}
    assert not findings


@pytest.mark.parametrize(
    ("script", "details"),
    [
        ("exit 0", []),
        ("echo '| Memory   |  Fail |'; exit 1", ["| Memory | Fail |"]),
        ("echo no daemon >&2; exit 1", ["no daemon"]),
    ],
)
def test_dcgmi_is_run_if_it_is_installed(monkeypatch, tmp_path, script, details):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert active.dcgm() == []
    (tmp_path / "dcgmi").write_text(f'#!/bin/sh\n[ "$*" = "diag -r 1" ] || exit 9\n{script}\n')
    (tmp_path / "dcgmi").chmod(0o755)
    assert [finding.detail for finding in active.dcgm()] == details


def test_the_processor_of_a_host_without_gpus_is_exercised(capsys, monkeypatch):
    monkeypatch.setattr(active, "SLOWER", 0.0)  # accepts all rates, because this machine may be busy
    monkeypatch.setattr(active, "TIRED", 0.0)
    code = main(["--active", "--seconds", "0.1"])
    printed = capsys.readouterr().out
    for name, unit in (("products of float32", "FLOP/s"), ("products of bfloat16", "FLOP/s"), ("links", "B/s")):
        assert f"{name}: " in printed and unit in printed
    assert "wrong" not in printed and "exercise" not in printed and code in (0, 1)
