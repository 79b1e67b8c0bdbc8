"""What one look finds out about a device: a GPU, or the host itself."""

from __future__ import annotations

from dataclasses import dataclass

from recycle_pp.wire.messages.health import Reading


@dataclass(frozen=True)
class Sample:
    """None: the device or the driver does not report it.

    device         the GPU's UUID, or "host"
    lost           whether the GPU no longer answers on its bus
    recovery       what NVIDIA's driver wants done with the GPU, for instance "GPU_RESET"; "" if nothing
    xids           XIDs since the last look
    uncorrected    memory errors that were not corrected, since the driver was loaded or the host booted
    corrected      those that were
    remap_pending  whether rows of the GPU's memory wait for a reset to be replaced
    remap_failed   whether a row could not be replaced
    throttle       why the clock is lower than it could be: "heat", "power"
    temperature    degrees Celsius
    power          watts
    clock          MHz
    top_clock      MHz: the highest clock of the device
    busy           per cent of the time in which the device works
    links          active NVLinks
    link_errors    replays and recoveries of all NVLinks, ever
    ports          network ports that are up
    link_downs     how often a network port went down, ever
    disk           errors of disks that the kernel has logged since the last look
    """

    device: str
    lost: bool = False
    recovery: str = ""
    xids: tuple[int, ...] = ()
    uncorrected: int | None = None
    corrected: int | None = None
    remap_pending: bool = False
    remap_failed: bool = False
    throttle: frozenset[str] = frozenset()
    temperature: float | None = None
    power: float | None = None
    clock: float | None = None
    top_clock: float | None = None
    busy: float | None = None
    links: int | None = None
    link_errors: int | None = None
    ports: frozenset[str] = frozenset()
    link_downs: int | None = None
    disk: tuple[str, ...] = ()

    @property
    def reading(self) -> Reading:
        return Reading(self.device, self.temperature, self.power, self.clock, self.uncorrected, self.corrected)
