"""Checks of this machine, or of a scripted one, and their command line."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from importlib import metadata

import pytest

from recycle_pp import doctor
from recycle_pp.command import exit_code
from recycle_pp.machine_checks import facts, machine
from recycle_pp.machine_checks.__main__ import main

STAND_IN = "recycle_pp.testing.scripted_nvml"


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Makes the tests measure disks with one block only."""
    monkeypatch.setattr(facts, "DISK_BYTES", facts.BLOCK)


def named(checks, name):
    return next(check for check in checks if check.name == name)


def test_a_listener_makes_its_port_busy_and_its_host_reachable():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert facts.busy_ports([port]) == [port]
        assert facts.route_to("127.0.0.1", port) == facts.Route("127.0.0.1", "lo", listens=True)
    assert facts.busy_ports([port]) == []
    assert facts.route_to("127.0.0.1", port) == facts.Route("127.0.0.1", "lo", listens=False)


def test_a_name_without_an_address_is_an_error_of_the_route():
    assert facts.route_to("no-such-host.invalid", 1).error
    assert facts.route_to("no..name", 1).error


def test_a_missing_run_folder_is_measured_at_its_parent_and_left_missing(tmp_path):
    disk = facts.write_rate(tmp_path / "runs" / "mine")
    assert disk.rate > 0 and disk.free > 0 and not disk.error
    assert os.listdir(tmp_path) == []


def test_a_folder_without_write_access_is_an_error(tmp_path):
    assert facts.write_rate(facts.Path("/proc")).error


def test_the_largest_file_of_a_data_folder_is_read(tmp_path):
    (tmp_path / "small").write_bytes(b"1")
    assert facts.read_rate(tmp_path) == facts.Disk(), "too small to measure"
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "large").write_bytes(bytes(facts.BLOCK))
    assert facts.read_rate(tmp_path).rate > 0 and facts.read_rate(tmp_path / "sub" / "large").rate > 0


def test_missing_data_are_an_error(tmp_path):
    assert facts.read_rate(tmp_path).error and facts.read_rate(tmp_path / "none").error


def test_a_call_that_hangs_returns_none_after_its_time_limit():
    ends = threading.Event()
    assert facts.within(0.05, ends.wait) is None
    ends.set()
    assert facts.within(20.0, ends.wait) is True


def test_a_call_that_fails_raises_in_the_caller():
    with pytest.raises(KeyError):
        facts.within(20.0, lambda: {}["none"])


def test_a_folder_that_cannot_be_read_is_named_in_one_sentence(capsys, tmp_path):
    path = str(tmp_path / ("a" * 300))
    assert exit_code(lambda: doctor.main([path]), "recycle_pp") == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"recycle_pp: {path}") and printed.count("\n") == 1


def test_the_requirements_of_the_package_exclude_extras():
    found = facts.installed()
    assert found.requires["python"] == ">=3.11" and "torch" in found.requires and "pytest" not in found.requires
    assert found.versions["numpy"] == metadata.version("numpy")


def test_a_source_tree_that_is_not_installed_is_a_warning(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(facts.metadata, "distribution", missing)
    (check,) = machine._packages(gpus=False)
    assert check.verdict == "warning" and "pip install -e" in check.advice


def test_the_loops_are_counted_in_the_folder_that_numba_uses(monkeypatch, tmp_path):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    assert facts.compiled_loops() == 0
    (tmp_path / "compiled_0123").mkdir()
    (tmp_path / "compiled_0123" / "timing.latest-107.py311.nbi").touch()
    assert facts.compiled_loops() == 1


@pytest.fixture
def script(monkeypatch, tmp_path):
    """Writes the script of two GPUs. Their exercises are only recorded, in `exercised`."""
    monkeypatch.setenv("RECYCLE_NVML", STAND_IN)
    monkeypatch.setenv("RECYCLE_NVML_SCRIPT", str(tmp_path / "script.json"))
    monkeypatch.delitem(sys.modules, STAND_IN, raising=False)
    exercised = []
    monkeypatch.setattr(machine, "exercise", lambda uuids, _: exercised.extend(uuids) or ({}, []))

    def write(**second):
        script = {"devices": 2, "metrics": str(tmp_path / "none"), "timeline": [{"step": -1, "device": 1, **second}]}
        (tmp_path / "script.json").write_text(json.dumps(script))
        return exercised

    return write


def test_gpus_are_judged_by_the_ladder_of_health_and_by_their_setup(script, tmp_path):
    exercised = script(recovery=1, lanes=8, ancestor=20, nvlink=5, peers=1)
    checks = machine.check_machine(tmp_path)
    assert named(checks, "GPU 0").verdict == "well" and "55 C" in named(checks, "GPU 0").value
    assert named(checks, "GPU 1").verdict == "broken" and "GPU_RESET" in named(checks, "GPU 1").advice
    assert named(checks, "GPU PCIe").value == "generation 5 x8: GPU 1"
    assert named(checks, "GPU driver").value == "580.95.05"
    # The first GPU answers for the pair, and its script describes a healthy GPU.
    assert named(checks, "GPU pairs").value == "1 pair by NVLink"
    assert exercised == ["GPU-00000000", "GPU-00000001"]


def test_memory_that_cannot_be_replaced_is_broken(script, tmp_path):
    script(remap_failed=1)
    assert named(machine.check_machine(tmp_path), "GPU 1").verdict == "broken"


@pytest.mark.parametrize(
    ("use", "value"), [({"processes": 1}, "1 process: GPU 1"), ({"used": 61_200_000_000}, "61.2 GB in use: GPU 1")]
)
def test_a_gpu_that_others_use_is_not_exercised(script, tmp_path, use, value):
    exercised = script(**use)
    found = machine.measure(tmp_path, None)
    assert exercised == ["GPU-00000000"] and [(of.kind, of.count) for of in found.gpus] == [("a scripted GPU", 2)]
    assert named(machine.check_machine(tmp_path, measured=found), "GPU users").value == value


def test_a_driver_that_hangs_or_reports_nothing_and_a_missing_library_are_problems(monkeypatch):
    def missing():
        raise facts.MissingPackage("nvidia-ml-py is not installed")

    (check,) = machine._devices(None)
    assert check.verdict == "broken" and check.value == "no answer"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(facts, "has_driver", lambda: True)
    monkeypatch.setattr(facts.Gpu, "all", list)
    assert named(machine._devices(facts.hardware()), "GPUs").value == "the driver reports none"
    for chosen in ("0,1", "GPU-00000000"):  # as SLURM sets it, even if the driver is broken
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        assert facts.hardware().trouble == "the driver reports none"
    for chosen in ("", "-1", "NoDevFiles"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        assert not facts.hardware().trouble, "the GPUs are hidden"
    monkeypatch.setattr(facts.Gpu, "all", missing)
    assert named(machine._devices(facts.hardware()), "GPUs").advice.endswith("pip install -U nvidia-ml-py")


def test_the_driver_may_take_longer_than_a_disk(monkeypatch, tmp_path):
    found = facts.hardware()
    monkeypatch.setattr(machine, "SECONDS", 0.01)
    monkeypatch.setattr(facts, "hardware", lambda: time.sleep(0.5) or found)
    assert machine.measure(tmp_path, None).hardware is found


def test_the_command_prints_json_and_returns_its_verdict(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "PORTS", (0,))
    missing = str(tmp_path / "none")
    assert main(["--run", str(tmp_path), "--data", missing, "--coordinator", "127.0.0.1:1", "--json"]) == 2
    printed = json.loads(capsys.readouterr().out)
    found = {check["name"]: check["verdict"] for check in printed["checks"]}
    assert printed["verdict"] == "broken" and found["data"] == "broken"
    assert found["coordinator"] == found["ports"] == "well"


def test_an_address_without_a_possible_port_is_refused_in_one_sentence(capsys):
    for address in ("host0", "127.0.0.1:65536"):
        assert main(["--coordinator", address]) == 2
        sentence = f"--coordinator must be HOST:PORT, with a port from 1 to 65535, not '{address}'"
        assert capsys.readouterr().err == f"recycle_pp: {sentence}\n"


def test_the_checks_do_not_import_torch(tmp_path):
    script = (
        "import sys; from pathlib import Path; from recycle_pp.machine_checks.machine import check_machine; "
        f"check_machine(Path({str(tmp_path)!r})); assert not {{'torch', 'numba', 'triton'}} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=100)


def test_doctor_without_a_run_checks_this_machine(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = doctor.main(["--json"])
    assert code in (0, 1) and json.loads(capsys.readouterr().out)["verdict"] in ("well", "warning")
