"""The configuration and the connections of a GPU, which do not change while a job runs."""

from __future__ import annotations

from typing import NamedTuple

IDLE_MEMORY = 2e9  # bytes above which a GPU counts as in use; the driver alone takes some hundred MB


class Setup(NamedTuple):
    """The setup of one GPU. None: the driver does not report the value, or the GPU lacks the feature.

    driver           version of the kernel module, "580.95.05"
    cuda             newest version of CUDA that the driver supports, (13, 0)
    generation       current PCIe generation; may be below `most_generation` while the GPU saves power
    most_generation  highest PCIe generation that the GPU and the machine support
    lanes            current number of PCIe lanes
    most_lanes       highest number of PCIe lanes that the GPU and the machine support
    awake            whether the GPU is in its fastest power state, P0
    persistent       whether the driver stays loaded while no process uses the GPU
    ecc              whether error correction of the GPU's memory is on
    links            number of active NVLinks
    processes        number of processes that compute on the GPU; a container may not see those of other containers
    used             bytes of the GPU's memory in use
    """

    driver: str | None = None
    cuda: tuple[int, int] | None = None
    generation: int | None = None
    most_generation: int | None = None
    lanes: int | None = None
    most_lanes: int | None = None
    awake: bool | None = None
    persistent: bool | None = None
    ecc: bool | None = None
    links: int | None = None
    processes: int | None = None
    used: int | None = None

    @property
    def is_in_use(self) -> bool:
        """Whether other programs use the GPU, as far as this process can see."""
        return bool(self.processes) or (self.used or 0) > IDLE_MEMORY


class Pair(NamedTuple):
    """The connection of two GPUs of a machine.

    way     "NVLink", "a PCIe switch", "the host bridge", "one NUMA node", ...
    direct  whether one GPU can write directly to the memory of the other; None: unknown
    """

    way: str
    direct: bool | None
