"""Reads samples of a GPU through NVIDIA's management library. The only importer of pynvml.

    gpu = Gpu.of(local_rank)            # None: no GPU or no driver here. MissingPackage: pynvml is not installed
    gpu.uuid, gpu.sample()
    gpu.wait(1.0)                       # waits for an XID, at most 1 s: True if one came

NVML needs no CUDA context, so a process that never imports torch can use it. A call may hang if the driver does: use a
thread that nobody waits for. RECYCLE_NVML names a module to be used instead of pynvml, for tests
(`recycle_pp.testing.scripted_nvml`).
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from .sample import Sample

STAND_IN = "RECYCLE_NVML"
T = TypeVar("T")
# In the order of nvmlDeviceGpuRecoveryAction_t.
_RECOVERY = ("", "GPU_RESET", "NODE_REBOOT", "DRAIN_P2P", "DRAIN_AND_RESET", "RECOVER_IMEX_DOMAIN", "BUS_RESET",
             "SYSTEM_REBOOT")  # fmt: skip
_REASONS = {
    "heat": ("HwThermalSlowdown", "SwThermalSlowdown"),
    "power": ("HwPowerBrakeSlowdown",),
}  # nvmlClocksEventReason...; the software's power cap is normal at full load


class MissingPackage(Exception):
    """There is a GPU, but nvidia-ml-py is not installed."""


class Gpu:
    """One GPU. Call all methods from one thread."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self.uuid = _text(nvml.nvmlDeviceGetUUID(handle))
        self.name = _text(nvml.nvmlDeviceGetName(handle))
        self._bus = _text(nvml.nvmlDeviceGetPciInfo(handle).busId).lower()
        self._events = self._registered()
        self._xids: list[int] = []

    @classmethod
    def of(cls, local_rank: int) -> Gpu | None:
        """The GPU that the worker of this rank uses (`execution.device.choose`)."""
        getters = _getters()
        return _made(getters[local_rank % len(getters)]) if getters else None

    @classmethod
    def all(cls) -> list[Gpu]:
        """The GPUs that processes of this environment may use."""
        return [gpu for get in _getters() if (gpu := _made(get))]

    @property
    def has_events(self) -> bool:
        """Whether the driver reports XIDs here. Otherwise only the kernel's log has them."""
        return self._events is not None

    def concerns(self, bus: str) -> bool:
        """Whether a line of the kernel's log that names this PCI address, "0000:65:00", is about this GPU."""
        return self._bus[-12:].startswith(bus.lower()[-10:])

    def wait(self, seconds: float) -> bool:
        """Waits for an XID. It is in the next sample."""
        nvml = self._nvml
        try:
            data = nvml.nvmlEventSetWait_v2(self._events, int(1000 * seconds))
        except nvml.NVMLError_Timeout:
            return False
        except nvml.NVMLError:  # the events are lost; a wait that ends at once would use a core
            self._events = None
            return False
        self._xids.append(int(data.eventData))
        return True

    def sample(self) -> Sample:
        nvml = self._nvml
        while self.has_events and self.wait(0.0):
            pass
        found, self._xids = tuple(self._xids), []
        try:
            recovery = self._recovery()
            remapped = self._ask(nvml.nvmlDeviceGetRemappedRows)
            power = self._ask(nvml.nvmlDeviceGetPowerUsage)
            busy = self._ask(nvml.nvmlDeviceGetUtilizationRates)
            links, errors = self._links()
            return Sample(
                self.uuid,
                recovery=recovery,
                xids=found,
                uncorrected=self._ask(
                    nvml.nvmlDeviceGetTotalEccErrors, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
                ),
                corrected=self._ask(
                    nvml.nvmlDeviceGetTotalEccErrors, nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, nvml.NVML_VOLATILE_ECC
                ),
                remap_pending=bool(remapped and remapped[2]),
                remap_failed=bool(remapped and remapped[3]),
                throttle=self._throttle(),
                temperature=self._ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
                power=None if power is None else power / 1000,
                clock=self._ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
                top_clock=self._ask(nvml.nvmlDeviceGetMaxClockInfo, nvml.NVML_CLOCK_SM),
                busy=None if busy is None else busy.gpu,
                links=links,
                link_errors=errors,
            )
        except nvml.NVMLError_GpuIsLost:
            return Sample(self.uuid, lost=True, xids=found)

    def _ask(self, call: Callable[..., T], *arguments: Any) -> T | None:
        """The answer to a question about the GPU; None if it has none. Raises if the GPU is lost."""
        nvml = self._nvml
        try:
            return call(self._handle, *arguments)
        except nvml.NVMLError_GpuIsLost:
            raise
        except nvml.NVMLError:
            return None

    def _recovery(self) -> str:
        nvml = self._nvml
        values = self._ask(nvml.nvmlDeviceGetFieldValues, [nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
        if not values or values[0].nvmlReturn != nvml.NVML_SUCCESS:  # a driver before 570
            return ""
        number = int(values[0].value.uiVal)
        return _RECOVERY[number] if number < len(_RECOVERY) else f"recovery action {number}"

    def _throttle(self) -> frozenset[str]:
        nvml = self._nvml
        bits = self._ask(nvml.nvmlDeviceGetCurrentClocksEventReasons) or 0
        masks = {why: sum(getattr(nvml, f"nvmlClocksEventReason{name}") for name in of) for why, of in _REASONS.items()}
        return frozenset(why for why, mask in masks.items() if bits & mask)

    def _links(self) -> tuple[int | None, int | None]:
        """The number of active NVLinks, and the sum of their replays and recoveries."""
        nvml = self._nvml
        states = [self._ask(nvml.nvmlDeviceGetNvLinkState, link) for link in range(nvml.NVML_NVLINK_MAX_LINKS)]
        active = [link for link, state in enumerate(states) if state]
        if all(state is None for state in states):
            return None, None
        kinds = (nvml.NVML_NVLINK_ERROR_DL_REPLAY, nvml.NVML_NVLINK_ERROR_DL_RECOVERY)
        counts = [self._ask(nvml.nvmlDeviceGetNvLinkErrorCounter, link, kind) for link in active for kind in kinds]
        known = [count for count in counts if count is not None]
        return len(active), sum(known) if known else None

    def _registered(self) -> Any:
        nvml = self._nvml
        with suppress(nvml.NVMLError):  # inside some virtual machines
            events = nvml.nvmlEventSetCreate()
            nvml.nvmlDeviceRegisterEvents(self._handle, nvml.nvmlEventTypeXidCriticalError, events)
            return events
        return None


def scripted() -> bool:
    """Whether a stand-in plays the library."""
    return STAND_IN in os.environ


def has_driver() -> bool:
    """Whether NVIDIA's driver is loaded, even if it does not work."""
    return any(Path(path).exists() for path in ("/dev/nvidiactl", "/dev/dxg"))


def _library() -> Any:
    """pynvml, or its stand-in; None without NVIDIA's driver."""
    if name := os.environ.get(STAND_IN):
        return importlib.import_module(name)
    if not has_driver():
        return None  # the import would cost every supervisor 5 MB
    try:
        import pynvml
    except ImportError:
        raise MissingPackage from None
    return pynvml


_Getter = tuple[Any, Callable[..., Any], int | str]
"""The library, and its function that returns a GPU's handle, with the argument"""


def _getters() -> list[_Getter]:
    """One for each GPU that CUDA_VISIBLE_DEVICES leaves, in CUDA's order; none without a driver that works."""
    nvml = _library()
    if nvml is None:
        return []
    try:
        nvml.nvmlInit()
        chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = [str(index) for index in range(nvml.nvmlDeviceGetCount())] if chosen is None else chosen.split(",")
    except nvml.NVMLError:
        return []
    getters: list[_Getter] = []
    for name in (name.strip() for name in names):
        if name.isdigit():
            getters.append((nvml, nvml.nvmlDeviceGetHandleByIndex, int(name)))
        elif name.startswith(("GPU-", "MIG-")):
            getters.append((nvml, nvml.nvmlDeviceGetHandleByUUID, name))
        else:  # CUDA ignores an invalid name and all names after it
            break
    return getters


def _made(getter: _Getter) -> Gpu | None:
    nvml, get, name = getter
    with suppress(nvml.NVMLError):
        return Gpu(nvml, get(name))
    return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
