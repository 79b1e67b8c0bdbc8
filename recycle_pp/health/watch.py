"""The thread that looks at the hardware of one rank, every few seconds and at each death of its worker.

    watch = Watch(local_rank, seconds=10.0, device="auto", quarantine=run.quarantine, report=report)
    watch.start()           # report(Health(...)) is called in the thread, after every look
    watch.look()            # looks soon, for instance because the worker has died
    watch.silent            # seconds since the last look has ended
    watch.close()           # does not wait
    watch.open(); watch.once(Host())       # instead of `start`: looks once, in the calling thread

A call of the driver or a read of the run folder may hang. Then only this thread hangs, and nobody waits for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from recycle_pp.wire.files import UnreadableFile
from recycle_pp.wire.messages.health import Finding, Health

from . import quarantine
from .host import HOST, Host
from .ladder import History, judge
from .nvml import Gpu, MissingPackage, scripted
from .sample import Sample

XID_SECONDS = 1.0  # limit on one wait for an XID, during which no death is noticed


class Watch:
    def __init__(
        self, local_rank: int, seconds: float, device: str, quarantine: Path, report: Callable[[Health], None]
    ) -> None:
        """
        local_rank  selects the GPU. Only rank 0 of a node reports notes about the host
        seconds     between two looks
        device      run.device: auto, cpu or cuda
        """
        self._local_rank = local_rank
        self._seconds = seconds
        self._device = device
        self._quarantine = quarantine
        self._report = report
        self.gpu: Gpu | None = None
        self._standing: list[Finding] = []  # findings that no look can change
        self._histories: dict[str, History] = {}
        self._wake = threading.Event()
        self._closed = False
        self._looked = time.monotonic()

    @property
    def silent(self) -> float:
        return time.monotonic() - self._looked

    def start(self) -> None:
        threading.Thread(target=self._run, name="health", daemon=True).start()

    def look(self) -> None:
        self._wake.set()

    def close(self) -> None:
        self._closed = True
        self._wake.set()

    # -- in the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        self.open()
        host = Host()
        while not self._closed:
            self._report(self.once(host))
            self._looked = time.monotonic()
            self._wait(self._looked + self._seconds)

    def open(self) -> None:
        """Opens the driver and reads the quarantine. Both may hang."""
        if self._device == "cpu" and not scripted():
            return
        try:
            self.gpu = Gpu.of(self._local_rank)
        except MissingPackage:
            detail = "nvidia-ml-py is not installed, so the GPUs are not watched: pip install 'recycle-pp[gpu]'"
            self._standing.append(Finding(HOST, "nvml", "note", detail))
        if self.gpu is None:
            return
        with suppress(UnreadableFile):
            entry = quarantine.read(self._quarantine).get(self.gpu.uuid)
            if entry is not None:
                detail = f"in {self._quarantine}: {entry.detail}"
                self._standing.append(Finding(self.gpu.uuid, "quarantine", "kill", detail))

    def once(self, host: Host) -> Health:
        """Looks at the GPU and at the host. host: keeps what it has read before."""
        samples = [host.sample()]
        if self.gpu is not None:
            sample = self.gpu.sample()
            logged = tuple(code for bus, code in host.xids if self.gpu.concerns(bus))
            samples.append(sample if self.gpu.has_events else replace(sample, xids=sample.xids + logged))
        findings = [finding for sample in samples for finding in self._judge(sample)]
        return Health([sample.reading for sample in samples], self._standing + findings)

    def _judge(self, sample: Sample) -> list[Finding]:
        history = self._histories.get(sample.device)
        history = self._histories[sample.device] = history.add(sample) if history else History.begin(sample)
        found = judge(history)
        if sample.device == HOST and self._local_rank != 0:  # one voice a node is enough
            return [finding for finding in found if finding.action != "note"]
        return found

    def _wait(self, until: float) -> None:
        """Returns at `until`, after an XID, or when a look is wanted."""
        while not self._wake.is_set() and (left := until - time.monotonic()) > 0:
            if self.gpu is None or not self.gpu.has_events:
                self._wake.wait(left)
            elif self.gpu.wait(min(left, XID_SECONDS)):
                return
        self._wake.clear()
