"""A stand-in for pynvml, for whole jobs on machines without GPUs. A script describes the GPUs and their changes.

    RECYCLE_NVML=recycle_pp.testing.scripted_nvml RECYCLE_NVML_SCRIPT=script.json torchrun ... -m recycle_pp.train ...

    {"devices": 4,
     "metrics": "runs/mine/metrics.jsonl",
     "timeline": [{"step": 20, "device": 1, "xid": 79},
                  {"step": 8, "device": 2, "throttle": "HwThermalSlowdown", "clock": 990},
                  {"step": 30, "device": 2, "throttle": "", "clock": 1980},
                  {"step": 9, "device": 0, "uncorrected": 2},
                  {"step": 9, "device": 3, "hangs": 60}]}

A change applies once the metrics file shows that its step has been committed. Values that no change has set are those
of a healthy GPU (`HEALTHY`). For a device with "gone": 1, even the call that returns its handle fails. All names that
are not defined here come from pynvml itself.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
from pynvml import *  # noqa: F403  # constants and errors

HEALTHY: dict[str, Any] = {
    "recovery": 0,
    "lost": False,
    "uncorrected": 0,
    "corrected": 0,
    "remap_pending": 0,
    "remap_failed": 0,
    "throttle": "",
    "temperature": 55,
    "power": 400,
    "clock": 1980,
    "busy": 100,
    "links": 18,
    "link_errors": 0,
    "hangs": 0,
    "driver": "580.95.05",
    "cuda": 13000,
    "generation": 5,
    "lanes": 16,
    "power_state": 0,
    "persistent": 1,
    "ecc": 1,
    "processes": 0,
    "used": 600_000_000,
    "peers": 0,  # nvmlGpuP2PStatus_t, to all other GPUs
    "nvlink": 0,  # the same, by NVLink
    "ancestor": 50,  # nvmlGpuTopologyLevel_t
}
_script: dict[str, Any] = {}
_taken: set[int] = set()  # indices of the changes in the timeline whose XID has been delivered


def nvmlInit() -> None:
    _script.update(json.loads(Path(os.environ["RECYCLE_NVML_SCRIPT"]).read_text()))


def nvmlDeviceGetCount() -> int:
    return int(_script["devices"])


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    if any(change.get("gone") and change["device"] == index for change in _script["timeline"]):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
    return index


def nvmlDeviceGetUUID(handle: int) -> str:
    return f"GPU-{handle:08d}"


def nvmlDeviceGetName(handle: int) -> str:
    return "a scripted GPU"


def nvmlDeviceGetPciInfo(handle: int) -> Any:
    return SimpleNamespace(busId=f"00000000:{handle:02x}:00.0")


def nvmlDeviceGetFieldValues(handle: int, fields: list[int]) -> list[Any]:
    value = SimpleNamespace(uiVal=_now(handle)["recovery"])
    return [SimpleNamespace(nvmlReturn=pynvml.NVML_SUCCESS, value=value) for _ in fields]


def nvmlDeviceGetTotalEccErrors(handle: int, kind: int, counter: int) -> int:
    uncorrected = kind == pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    return int(_now(handle)["uncorrected" if uncorrected else "corrected"])


def nvmlDeviceGetRemappedRows(handle: int) -> tuple[int, int, int, int]:
    now = _now(handle)
    return 0, 0, now["remap_pending"], now["remap_failed"]


def nvmlDeviceGetCurrentClocksEventReasons(handle: int) -> int:
    names = _now(handle)["throttle"].split()
    return sum(int(getattr(pynvml, f"nvmlClocksEventReason{name}")) for name in names)


def nvmlDeviceGetTemperature(handle: int, sensor: int) -> int:
    return int(_now(handle)["temperature"])


def nvmlDeviceGetPowerUsage(handle: int) -> int:
    return 1000 * int(_now(handle)["power"])


def nvmlDeviceGetClockInfo(handle: int, kind: int) -> int:
    return int(_now(handle)["clock"])


def nvmlDeviceGetMaxClockInfo(handle: int, kind: int) -> int:
    return 1980


def nvmlDeviceGetUtilizationRates(handle: int) -> Any:
    return SimpleNamespace(gpu=_now(handle)["busy"])


def nvmlDeviceGetNvLinkState(handle: int, link: int) -> int:
    return int(link < _now(handle)["links"])


def nvmlDeviceGetNvLinkErrorCounter(handle: int, link: int, kind: int) -> int:
    return int(_now(handle)["link_errors"])


def nvmlSystemGetDriverVersion() -> str:
    return str(_now(0)["driver"])


def nvmlSystemGetCudaDriverVersion_v2() -> int:
    return int(_now(0)["cuda"])


def nvmlDeviceGetCurrPcieLinkGeneration(handle: int) -> int:
    return int(_now(handle)["generation"])


def nvmlDeviceGetMaxPcieLinkGeneration(handle: int) -> int:
    return int(HEALTHY["generation"])


def nvmlDeviceGetCurrPcieLinkWidth(handle: int) -> int:
    return int(_now(handle)["lanes"])


def nvmlDeviceGetMaxPcieLinkWidth(handle: int) -> int:
    return int(HEALTHY["lanes"])


def nvmlDeviceGetPerformanceState(handle: int) -> int:
    return int(_now(handle)["power_state"])


def nvmlDeviceGetPersistenceMode(handle: int) -> int:
    return int(_now(handle)["persistent"])


def nvmlDeviceGetEccMode(handle: int) -> list[int]:
    return [int(_now(handle)["ecc"])] * 2


def nvmlDeviceGetComputeRunningProcesses(handle: int) -> list[Any]:
    return [SimpleNamespace(pid=number) for number in range(_now(handle)["processes"])]


def nvmlDeviceGetMemoryInfo(handle: int) -> Any:
    return SimpleNamespace(used=_now(handle)["used"])


def nvmlDeviceGetP2PStatus(handle: int, other: int, index: int) -> int:
    assert isinstance(index, int), "pynvml has constants that are tuples, which ctypes refuses"
    return int(_now(handle)["nvlink" if index == pynvml.NVML_P2P_CAPS_INDEX_NVLINK else "peers"])


def nvmlDeviceGetTopologyCommonAncestor(handle: int, other: int) -> int:
    return int(_now(handle)["ancestor"])


def nvmlEventSetCreate() -> list[int]:
    return []


def nvmlDeviceRegisterEvents(handle: int, kinds: int, events: list[int]) -> None:
    events.append(handle)


def nvmlEventSetWait_v2(events: list[int], milliseconds: int) -> Any:
    deadline = time.monotonic() + milliseconds / 1000
    while True:
        step = _step()
        for place, change in enumerate(_script["timeline"]):
            if "xid" in change and change["device"] in events and change["step"] <= step and place not in _taken:
                _taken.add(place)
                return SimpleNamespace(device=change["device"], eventData=change["xid"])
        if time.monotonic() >= deadline:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
        time.sleep(min(0.02, max(0.0, deadline - time.monotonic())))


def _now(handle: int) -> dict[str, Any]:
    """The state of a GPU after the last committed step. Sleeps if the GPU hangs, and raises NVMLError if it is lost."""
    state, step = dict(HEALTHY), _step()
    for change in _script["timeline"]:
        if change["device"] == handle and change["step"] <= step:
            state |= change
    if state["hangs"]:
        time.sleep(state["hangs"])
    if state["lost"]:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
    return state


def _step() -> int:
    """The last committed step; -1 before the first one."""
    try:
        with open(_script["metrics"], "rb") as file:
            return file.read().count(b"\n") - 1
    except OSError:
        return -1
