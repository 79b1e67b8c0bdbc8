"""The rules about GPUs as a table: how they are set up, and the verdict with the words that matter."""

import pytest

from recycle_pp.health.active import Exercise
from recycle_pp.health.setup import Pair, Setup
from recycle_pp.machine_checks.gpu_rules import exercises, found, gpus
from recycle_pp.wire.messages.health import Finding

WELL = Setup("580.95.05", (13, 0), 5, 5, 16, 16, True, True, True, 18, 0)
NVLINK = {(0, 1): Pair("NVLink", True)}
COPIES = Exercise("copies", "B/s", 2e12, 2e12, 2e12, 100, 0, "abc")

TABLE = [
    ({}, {}, []),
    ({"generation": 1, "awake": False}, {}, []),  # it saves power
    ({"generation": 1}, {}, [("GPU PCIe", "warning", "generation 1 x16: GPU 1")]),
    ({"lanes": 8, "awake": False}, {}, [("GPU PCIe", "warning", "generation 5 x8: GPU 1")]),
    ({"persistent": False}, {}, [("GPU persistence", "warning", "off: GPU 1")]),
    ({"ecc": False}, {}, [("GPU memory's ECC", "warning", "off: GPU 1")]),
    ({"processes": 2}, {}, [("GPU users", "warning", "2 processes: GPU 1")]),
    ({"used": 600_000_000}, {}, []),  # used by the driver itself
    ({"used": 61_200_000_000}, {}, [("GPU users", "warning", "61.2 GB in use: GPU 1")]),  # used by another container
    ({"links": 17}, {}, [("GPU NVLinks", "warning", "17 active: GPU 1")]),
    (dict.fromkeys(Setup._fields), {}, []),  # the driver reports nothing
    ({}, {(0, 1): Pair("the host bridge", False)}, [("GPU pairs", "warning", "no peer access between 0 and 1")]),
    ({}, {(0, 1): Pair("the host bridge", None)}, []),
]


@pytest.mark.parametrize(("second", "pairs", "problems"), TABLE)
def test_what_is_wrong_with_a_gpu_is_named_with_its_number(second, pairs, problems):
    checks = gpus([WELL, WELL._replace(**second)], NVLINK | pairs, "2.13.0+cu130")
    assert [(check.name, check.verdict) for check in checks if check.verdict != "well"] == [of[:2] for of in problems]
    for check, (_, _, words) in zip([check for check in checks if check.verdict != "well"], problems, strict=True):
        assert words in check.value and check.advice


@pytest.mark.parametrize(
    ("torch", "verdict"), [("2.13.0+cu130", "broken"), ("2.13.0+cu126", "well"), ("2.13.0", "well"), (None, "well")]
)
def test_a_driver_that_is_older_than_the_cuda_of_torch_is_broken(torch, verdict):
    driver = gpus([WELL._replace(cuda=(12, 4))], {}, torch)[0]
    assert (driver.name, driver.value, driver.verdict) == ("GPU driver", "580.95.05", verdict)


def test_an_exercise_is_one_check_with_the_range_of_its_rates_and_the_findings_of_all_gpus():
    wrong = Finding("GPU-b", "copies", "drain", "1 of 100 results were wrong")
    died = Finding("GPU-c", "exercise", "drain", "after 0 exercises: CUDA error")
    checks = exercises({"GPU-a": [COPIES], "GPU-b": [COPIES], "GPU-c": []}, [wrong, died])
    assert [(check.name, check.value, check.verdict, check.advice) for check in checks] == [
        ("GPU copies", "2 TB/s to 2 TB/s", "broken", "GPU 1: 1 of 100 results were wrong"),
        ("GPU exercise", "failed", "broken", "GPU 2: after 0 exercises: CUDA error"),
    ]


def test_the_summary_for_other_machines_has_each_kind_of_gpu_apart():
    results = {"GPU-a": [COPIES], "GPU-b": [], "GPU-c": [COPIES]}
    h100, a100 = found(["H100", "A100", "H100"], [WELL, WELL._replace(links=12), WELL._replace(links=17)], results)
    assert (h100.kind, h100.count, h100.links, len(h100.done)) == ("H100", 2, 18, 1)
    assert (a100.kind, a100.count, a100.links, a100.done) == ("A100", 1, 12, [])
    assert (h100.done[0].rate, h100.done[0].digest) == (2e12, "abc")
