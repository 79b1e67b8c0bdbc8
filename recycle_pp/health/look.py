"""Checks the host and its GPUs once, outside of a job.

samples, findings = look(Host(), Gpu.all())     # the host's sample is the first
figures(samples[0].reading)                     # "55 C, 400 W, 1980 MHz, 0 memory errors"
"""

from __future__ import annotations

from collections.abc import Sequence

from recycle_pp.wire.messages.health import Finding, Reading

from .host import Host
from .ladder import History, judge
from .nvml import Gpu
from .sample import Sample


def look(host: Host, gpus: Sequence[Gpu]) -> tuple[list[Sample], list[Finding]]:
    """(one sample of each device, findings after this single check). Hangs if the driver hangs."""
    samples = [host.sample(), *(gpu.sample() for gpu in gpus)]
    return samples, [finding for sample in samples for finding in judge(History.begin(sample))]


def figures(reading: Reading) -> str:
    """The known values of a reading as text: "55 C, 400 W, 1980 MHz, 0 memory errors"."""
    parts = [
        f"{value:.0f} {unit}"
        for value, unit in (
            (reading.temperature, "C"),
            (reading.power, "W"),
            (reading.clock, "MHz"),
            (reading.uncorrected, "memory errors"),
        )
        if value is not None
    ]
    return ", ".join(parts) or "no figures"
