"""Reads samples of a GPU through NVIDIA's management library, NVML. No other module imports pynvml.

    gpu = Gpu.of(local_rank)            # None without a GPU or a driver; raises MissingPackage without pynvml
    gpu.uuid, gpu.sample()
    gpu.setup(), gpu.pair(other)        # how it is connected and configured, for checks before a job
    gpu.wait(1.0)                       # waits at most 1 s for an XID; True if one has arrived

NVML needs no CUDA context, so a process that never imports torch can use it. A call may hang if the driver hangs, so
use a thread that no other thread waits for. For tests, RECYCLE_NVML names a module that replaces pynvml
(`recycle_pp.testing.scripted_nvml`).
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from .sample import Sample
from .setup import Pair, Setup

STAND_IN = "RECYCLE_NVML"
T = TypeVar("T")
_UUIDS = ("GPU-", "MIG-")  # beginnings of UUIDs
# In the order of nvmlDeviceGpuRecoveryAction_t.
_RECOVERY = ("", "GPU_RESET", "NODE_REBOOT", "DRAIN_P2P", "DRAIN_AND_RESET", "RECOVER_IMEX_DOMAIN", "BUS_RESET",
             "SYSTEM_REBOOT")  # fmt: skip
_REASONS = {
    "heat": ("HwThermalSlowdown", "SwThermalSlowdown"),
    "power": ("HwPowerBrakeSlowdown",),
}  # ends of names nvmlClocksEventReason...; without SwPowerCap, which is normal at full load

# The connection of two GPUs, by the nvmlGpuTopologyLevel_t of their nearest common ancestor.
_WAYS = {0: "one board", 10: "a PCIe switch", 20: "several PCIe switches", 30: "the host bridge", 40: "one NUMA node",
         50: "the link between CPU sockets"}  # fmt: skip


class MissingPackage(Exception):
    """There is a GPU, but nvidia-ml-py is not installed, or is too old. The text states which."""


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
        """The GPU that the worker of this rank uses (`execution.device.choose`). None without a GPU or a driver."""
        getters = _getters()
        return _made(getters[local_rank % len(getters)]) if getters else None

    @classmethod
    def all(cls) -> list[Gpu]:
        """The GPUs that processes of this environment may use."""
        return [gpu for get in _getters() if (gpu := _made(get))]

    @classmethod
    def silent(cls) -> list[str]:
        """Indices or UUIDs of GPUs that processes of this environment may use, but that do not answer."""
        return [str(getter[2]) for getter in _getters() if _made(getter) is None]

    @property
    def has_events(self) -> bool:
        """Whether the driver reports XIDs here. Otherwise only the kernel's log has them."""
        return self._events is not None

    def concerns(self, bus: str) -> bool:
        """Whether this GPU has this PCI address, in the form of the kernel's log: "0000:65:00"."""
        return self._bus[-12:].startswith(bus.lower()[-10:])

    def wait(self, seconds: float) -> bool:
        """Waits for an XID, at most this long. Returns whether one has arrived; the next sample contains it."""
        nvml = self._nvml
        try:
            data = nvml.nvmlEventSetWait_v2(self._events, int(1000 * seconds))
        except nvml.NVMLError_Timeout:
            return False
        except nvml.NVMLError:  # there will be no more events, and further waits would return at once
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

    def setup(self) -> Setup:
        """How the GPU is configured and connected; all fields are None if it is lost."""
        nvml = self._nvml
        try:
            cuda = nvml.nvmlSystemGetCudaDriverVersion_v2()
            ecc, power = self._ask(nvml.nvmlDeviceGetEccMode), self._ask(nvml.nvmlDeviceGetPerformanceState)
            persistent = self._ask(nvml.nvmlDeviceGetPersistenceMode)
            users = self._ask(nvml.nvmlDeviceGetComputeRunningProcesses)
            memory = self._ask(nvml.nvmlDeviceGetMemoryInfo)
            return Setup(
                driver=_text(nvml.nvmlSystemGetDriverVersion()),
                cuda=(cuda // 1000, cuda % 1000 // 10),
                generation=self._ask(nvml.nvmlDeviceGetCurrPcieLinkGeneration),
                most_generation=self._ask(nvml.nvmlDeviceGetMaxPcieLinkGeneration),
                lanes=self._ask(nvml.nvmlDeviceGetCurrPcieLinkWidth),
                most_lanes=self._ask(nvml.nvmlDeviceGetMaxPcieLinkWidth),
                awake=None if power is None else power == nvml.NVML_PSTATE_0,
                persistent=None if persistent is None else bool(persistent),
                ecc=None if ecc is None else bool(ecc[0]),
                links=self._links()[0],
                processes=None if users is None else len(users),
                used=None if memory is None else int(memory.used),
            )
        except nvml.NVMLError:
            return Setup()

    def pair(self, other: Gpu) -> Pair:
        """How this GPU is connected to another GPU of the machine."""
        nvml = self._nvml
        try:
            # Not ..._INDEX_READ, which nvidia-ml-py 13 defines as a tuple by mistake.
            direct = self._ask(nvml.nvmlDeviceGetP2PStatus, other._handle, nvml.NVML_P2P_CAPS_INDEX_WRITE)
            linked = self._ask(nvml.nvmlDeviceGetP2PStatus, other._handle, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
            level = self._ask(nvml.nvmlDeviceGetTopologyCommonAncestor, other._handle)
        except nvml.NVMLError:
            return Pair("unknown", None)
        known = "unknown" if level is None else _WAYS.get(level, "unknown")
        way = "NVLink" if linked == nvml.NVML_P2P_STATUS_OK else known
        return Pair(way, None if direct is None else direct == nvml.NVML_P2P_STATUS_OK)

    def _ask(self, call: Callable[..., T], *arguments: Any) -> T | None:
        """The result of an NVML call for this GPU; None if the GPU does not support it. Raises NVMLError_GpuIsLost."""
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
        if not values or values[0].nvmlReturn != nvml.NVML_SUCCESS:  # not supported by drivers before 570
            return ""
        number = int(values[0].value.uiVal)
        return _RECOVERY[number] if number < len(_RECOVERY) else f"recovery action {number}"

    def _throttle(self) -> frozenset[str]:
        nvml = self._nvml
        bits = self._ask(nvml.nvmlDeviceGetCurrentClocksEventReasons) or 0
        masks = {why: sum(getattr(nvml, f"nvmlClocksEventReason{name}") for name in of) for why, of in _REASONS.items()}
        return frozenset(why for why, mask in masks.items() if bits & mask)

    def _links(self) -> tuple[int | None, int | None]:
        """(number of active NVLinks, sum of their replays and recoveries). None: unknown."""
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
        with suppress(nvml.NVMLError):  # fails in some virtual machines
            events = nvml.nvmlEventSetCreate()
            nvml.nvmlDeviceRegisterEvents(self._handle, nvml.nvmlEventTypeXidCriticalError, events)
            return events
        return None


def scripted() -> bool:
    """Whether a stand-in replaces pynvml."""
    return STAND_IN in os.environ


def has_driver() -> bool:
    """Whether NVIDIA's driver is loaded, even if it does not work."""
    return any(Path(path).exists() for path in ("/dev/nvidiactl", "/dev/dxg"))


def hides_gpus() -> bool:
    """Whether CUDA_VISIBLE_DEVICES hides all GPUs: its first name is "", "-1" or SLURM's "NoDevFiles"."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0].strip()
    return not first.isdigit() and not first.startswith(_UUIDS)


def _library() -> Any:
    """pynvml, or its stand-in; None without NVIDIA's driver."""
    if name := os.environ.get(STAND_IN):
        return importlib.import_module(name)
    if not has_driver():
        return None  # the import would cost every supervisor 5 MB
    try:
        import pynvml
    except ImportError:
        raise MissingPackage("nvidia-ml-py is not installed") from None
    if not hasattr(pynvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION"):  # the newest name that this module needs
        raise MissingPackage("nvidia-ml-py is too old")
    return pynvml


_Getter = tuple[Any, Callable[..., Any], int | str]
"""(library, its function that returns the handle of a GPU, argument of that function)"""


def _getters() -> list[_Getter]:
    """One getter for each GPU that CUDA_VISIBLE_DEVICES allows, in CUDA's order. Empty without a working driver.

    NVML numbers GPUs by PCI address. So does CUDA in workers, unless the user has set CUDA_DEVICE_ORDER.
    """
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
        elif name.startswith(_UUIDS):
            getters.append((nvml, partial(_by_uuid, nvml), name))
        else:  # CUDA ignores an invalid name and all names after it
            break
    return getters


def _by_uuid(nvml: Any, name: str) -> Any:
    """The handle of the GPU with this UUID. Like CUDA, also takes the beginning of the UUID of a single GPU."""
    try:
        return nvml.nvmlDeviceGetHandleByUUID(name)
    except nvml.NVMLError:
        found = []
        for index in range(nvml.nvmlDeviceGetCount()):
            with suppress(nvml.NVMLError):  # another GPU is lost
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                if _text(nvml.nvmlDeviceGetUUID(handle)).startswith(name):
                    found.append(handle)
        if len(found) != 1:
            raise
        return found[0]


def _made(getter: _Getter) -> Gpu | None:
    nvml, get, name = getter
    with suppress(nvml.NVMLError):
        return Gpu(nvml, get(name))
    return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
