"""Checks the host and its GPUs outside of a job.

samples, findings = look(Host(), Gpu.all())     # the host's sample is the first; takes APART seconds if there are GPUs
figures(samples[0].reading)                     # "55 C, 400 W, 1980 MHz, 0 memory errors"
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from recycle_pp.wire.messages.health import Finding, Reading

from .host import Host
from .ladder import History, judge
from .nvml import Gpu
from .sample import Sample

APART = 1.0  # seconds between two checks


def look(host: Host, gpus: Sequence[Gpu]) -> tuple[list[Sample], list[Finding]]:
    """(newest sample of each device, findings). Hangs if the driver hangs.

    GPUs are checked twice, because a single check shows most faults only as a note (`ladder`)."""
    samples = _samples(host, gpus)
    histories = [History.begin(sample) for sample in samples]
    if gpus:
        time.sleep(APART)
        samples = _samples(host, gpus)
        histories = [history.add(sample) for history, sample in zip(histories, samples, strict=True)]
    return samples, [finding for history in histories for finding in judge(history)]


def _samples(host: Host, gpus: Sequence[Gpu]) -> list[Sample]:
    return [host.sample(), *(gpu.sample() for gpu in gpus)]


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
