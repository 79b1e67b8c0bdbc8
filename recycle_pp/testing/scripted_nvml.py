"""A stand-in for pynvml: GPUs as data, with a timeline. It plays the library for whole jobs on machines without GPUs.

    RECYCLE_NVML=recycle_pp.testing.scripted_nvml RECYCLE_NVML_SCRIPT=script.json torchrun ... -m recycle_pp.train ...

    {"devices": 4,
     "metrics": "runs/mine/metrics.jsonl",
     "timeline": [{"step": 20, "device": 1, "xid": 79},
                  {"step": 8, "device": 2, "throttle": "HwThermalSlowdown", "clock": 990},
                  {"step": 30, "device": 2, "throttle": "", "clock": 1980},
                  {"step": 9, "device": 0, "uncorrected": 2},
                  {"step": 9, "device": 3, "hangs": 60}]}

A change applies from the commit of its step on, which the file of metrics shows. Values that no change has set are
those of a healthy GPU (`HEALTHY`). All names that are not here come from pynvml itself.
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
}
_script: dict[str, Any] = {}
_taken: set[int] = set()  # places in the timeline whose XID was delivered


def nvmlInit() -> None:
    _script.update(json.loads(Path(os.environ["RECYCLE_NVML_SCRIPT"]).read_text()))


def nvmlDeviceGetCount() -> int:
    return int(_script["devices"])


def nvmlDeviceGetHandleByIndex(index: int) -> int:
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
    """The state of a GPU after the committed steps."""
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
    """The newest committed step; -1 before the first one."""
    try:
        with open(_script["metrics"], "rb") as file:
            return file.read().count(b"\n") - 1
    except OSError:
        return -1
