"""The values that one check reads from a device: a GPU, or the host."""

from __future__ import annotations

from dataclasses import dataclass

from recycle_pp.wire.messages.health import Reading


@dataclass(frozen=True)
class Sample:
    """The values from one check of a device. None: the device or its driver does not report the value.

    device         the GPU's UUID, or "host"
    lost           whether the GPU no longer answers on its bus
    recovery       recovery action that NVIDIA's driver asks for, for instance "GPU_RESET"; "" if none
    xids           XIDs since the previous check
    uncorrected    number of uncorrected memory errors since the driver was loaded or the host booted
    corrected      number of corrected memory errors since then
    remap_pending  whether rows of the GPU's memory will be replaced at its next reset
    remap_failed   whether a row of the GPU's memory could not be replaced
    throttle       reasons for a reduced clock: "heat", "power"
    temperature    degrees Celsius
    power          watts
    clock          MHz
    top_clock      highest clock of the device, in MHz
    busy           utilization in per cent
    links          number of active NVLinks
    link_errors    total number of replays and recoveries of all NVLinks
    ports          names of the network ports that are up
    link_downs     total number of times that a network port went down
    port_errors    total number of damaged packets and repaired links of all network ports
    disk           disk errors that the kernel has logged since the previous check
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
    port_errors: int | None = None
    disk: tuple[str, ...] = ()

    @property
    def reading(self) -> Reading:
        return Reading(self.device, self.temperature, self.power, self.clock, self.uncorrected, self.corrected)
