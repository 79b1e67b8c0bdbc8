"""The rules as a table: facts, the verdict, and words that the check must show."""

from math import inf

import pytest

from recycle_pp.machine_checks import rules
from recycle_pp.machine_checks.check import Check, as_json, code, text
from recycle_pp.machine_checks.facts import Disk, Name, Route
from recycle_pp.wire.messages.health import Finding

RANGE = ">=2.11,<2.14"
HERE = Route("10.0.0.7", "eth0", listens=False)
NOTE = Finding("GPU-1", "remap", "note", "rows wait")
DRAIN = Finding("GPU-1", "recovery", "drain", "the driver asks for GPU_RESET")
OTHER = Finding("GPU-2", "lost", "kill", "the GPU no longer answers")

TABLE = [
    (rules.version("torch", RANGE, "2.13.0+cpu"), "well", ""),
    (rules.version("torch", RANGE, "2.11.0"), "well", ""),
    (rules.version("torch", RANGE, "2.14.0"), "broken", f"pip install 'torch{RANGE}'"),
    (rules.version("torch", RANGE, "2.10.9"), "broken", "pip install"),
    (rules.version("torch", RANGE, None), "broken", "not installed"),
    (rules.version("python", ">=3.11", "3.10.2"), "broken", "use Python >=3.11"),
    (rules.torch_build("2.13.0+cpu", gpus=False), "well", ""),
    (rules.torch_build("2.13.0+cpu", gpus=True), "warning", "install torch for CUDA"),
    (rules.torch_build("2.13.0", gpus=True), "well", ""),
    (rules.shared_memory(256 << 20, gpus=True), "well", ""),
    (rules.shared_memory(64_000_000, gpus=True), "warning", "64 MB free"),
    (rules.shared_memory(64_000_000, gpus=False), "well", ""),
    (rules.open_files(1024, 4096), "well", ""),
    (rules.open_files(1023, 65536), "warning", "ulimit -n 4096"),
    (rules.open_files(1024, 4095), "warning", "--ulimit nofile=4096"),
    (rules.locked_memory(inf), "well", ""),
    (rules.locked_memory(8e6), "warning", "memlock=-1"),
    (rules.ports([29500, 29501], []), "well", ""),
    (rules.ports([29500, 29501], [29501]), "warning", "29501 in use"),
    (rules.host_name(Name("hostA", "10.0.0.7", 0.1)), "well", "10.0.0.7"),
    (rules.host_name(Name("hostA", "10.0.0.7", 1.5)), "warning", "1.5 s"),
    (rules.host_name(Name("hostA", "", 0.1)), "warning", "add hostA to /etc/hosts"),
    (rules.host_name(None), "warning", "no answer"),
    (rules.coordinator("host0", 29501, HERE), "well", "by eth0 (10.0.0.7), does not listen yet"),
    (rules.coordinator("host0", 29501, HERE._replace(listens=True)), "well", ", listens"),
    (rules.coordinator("host0", 29501, Route(error="No route to host")), "broken", "No route to host"),
    (rules.coordinator("host0", 29501, None), "broken", "ping host0"),
    (rules.coordinator("host0", 29501, Route("127.0.1.1", "lo")), "warning", "correct host0 in /etc/hosts"),
    (rules.coordinator("127.0.0.1", 29501, Route("127.0.0.1", "lo")), "well", ""),
    (rules.coordinator("host0", 29501, Route("::1", "lo")), "warning", "correct host0 in /etc/hosts"),
    (rules.coordinator("host0", 29501, Route("fe80::1%eth0", "eth0")), "well", ""),
    (rules.coordinator("::1", 29501, Route("::1", "lo")), "well", ""),
    (rules.coordinator("localhost", 29501, Route("127.0.0.1", "lo")), "well", ""),
    (rules.run_disk("runs", Disk(50e6, int(5e9))), "well", "writes 50 MB/s, 5.0 GB free"),
    (rules.run_disk("runs", Disk(49e6, int(5e9))), "warning", "put run.dir on a different disk"),
    (rules.run_disk("runs", Disk(50e6, int(4e9))), "warning", "df -h runs"),
    (rules.run_disk("runs", Disk(error="Permission denied")), "broken", "Permission denied"),
    (rules.run_disk("runs", None), "broken", "its file system hangs: df -h runs"),
    (rules.data_disk("data", Disk(10e6)), "well", "reads 10 MB/s"),
    (rules.data_disk("data", Disk(9e6)), "warning", "copy data to a local disk"),
    (rules.data_disk("data", Disk()), "well", "too small"),
    (rules.data_disk("data", Disk(error="no file")), "broken", "ls -ld data"),
    (rules.data_disk("data", None), "broken", "no answer"),
    (rules.triton_cache("cache", 1, gpus=True), "well", "1 file"),
    (rules.triton_cache("cache", 0, gpus=True), "warning", "copy cache"),
    (rules.triton_cache("cache", 0, gpus=False), "well", ""),
    (rules.triton_cache("cache", None, gpus=False), "broken", "df -h cache"),
    (rules.numba_cache(6), "well", "6 loops"),
    (rules.numba_cache(0), "warning", "recycle_pp.plan"),
    (rules.driver("nvidia-ml-py is not installed"), "warning", "pip install -U nvidia-ml-py"),
    (rules.driver("the driver reports none"), "broken", "nvidia-smi"),
    (rules.device("GPU 0", "GPU-1", "55 C", [OTHER]), "well", "55 C"),
    (rules.device("GPU 0", "GPU-1", "55 C", [NOTE, OTHER]), "warning", "rows wait"),
    (rules.device("GPU 0", "GPU-1", "55 C", [NOTE, DRAIN]), "broken", "remap, recovery"),
    (rules.device("GPU 1", "GPU-2", "55 C", [NOTE, OTHER]), "broken", "no longer answers"),
]


@pytest.mark.parametrize(("check", "verdict", "words"), TABLE, ids=[f"{row[0].name}-{row[1]}" for row in TABLE])
def test_a_rule_gives_the_expected_verdict(check, verdict, words):
    assert check.verdict == verdict and words in f"{check.value} | {check.advice}"
    assert bool(check.advice) == (verdict != "well"), "every problem comes with advice"


WELL = Check("ports", "free", "29500 free")
WARNING = Check("open files", "10, at most 10", "1024", "warning", "ulimit -n 4096")
BROKEN = Check("torch", "not installed", ">=2", "broken", "pip install torch")


@pytest.mark.parametrize(
    ("checks", "number", "verdict"),
    [([WELL], 0, "well"), ([WELL, WARNING], 1, "warning"), ([WELL, BROKEN, WARNING], 2, "broken")],
)
def test_the_worst_check_is_the_verdict_and_the_exit_code(checks, number, verdict):
    assert code(checks) == number and as_json(checks)["verdict"] == verdict
    assert [entry["name"] for entry in as_json(checks)["checks"]] == [check.name for check in checks]


def test_the_screen_begins_with_the_verdict_and_the_worst_check():
    assert text([WELL, WARNING, BROKEN]).splitlines() == [
        "broken: 2 of 3 checks found a problem",
        "  broken   torch       not installed   >=2",
        "           pip install torch",
        "  warning  open files  10, at most 10  1024",
        "           ulimit -n 4096",
        "  well     ports       free            29500 free",
    ]
