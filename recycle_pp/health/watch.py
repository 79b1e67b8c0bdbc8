"""Checks the hardware of one rank in a thread, every few seconds and after each death of its worker.

    watch = Watch(local_rank, seconds=10.0, device="auto", quarantine=run.quarantine, report=report)
    watch.start()           # starts the thread, which calls report(Health(...)) after every check
    watch.look()            # requests a check now, for instance because the worker has died
    watch.silent            # seconds since the end of the last check
    watch.close()           # ends the thread, and does not wait for its end
    watch.open(); watch.once(Host())       # instead of `start`: checks once, in the calling thread

Calls of the driver and reads of the run folder may hang. In that case only this thread hangs, because no other
thread waits for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from recycle_pp.wire.files import UnreadableFile
from recycle_pp.wire.messages.health import Finding, Health

from . import quarantine
from .host import HOST, Host
from .ladder import History, judge
from .nvml import Gpu, MissingPackage, scripted
from .sample import Sample

XID_SECONDS = 1.0  # limit on one wait for an XID, which delays a check requested by `look`


class Watch:
    def __init__(
        self,
        local_rank: int,
        seconds: float,
        device: str,
        quarantine: Path,
        report: Callable[[Health], None],
        quarantined: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """
        local_rank  selects the GPU; only local rank 0 of a node reports notes about the host
        seconds     time between two checks
        device      run.device: auto, cpu or cuda
        quarantine  path of quarantine.json
        report      called with the result of each check
        quarantined  UUID -> detail of more GPUs in quarantine
        """
        self._local_rank = local_rank
        self._seconds = seconds
        self._device = device
        self._quarantine = quarantine
        self._report = report
        self._quarantined = quarantined
        self.gpu: Gpu | None = None
        self._standing: list[Finding] = []  # findings that do not depend on samples, and are in every report
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
        except MissingPackage as problem:
            detail = f"{problem}, so the GPUs are not watched: pip install 'recycle-pp[gpu]'"
            self._standing.append(Finding(HOST, "nvml", "note", detail))
        if self.gpu is None:
            with suppress(MissingPackage):
                silent = [Finding(HOST, "lost", "note", f"GPU {name} does not answer") for name in Gpu.silent()]
                self._standing += silent
            return
        why = self._quarantined.get(self.gpu.uuid)
        with suppress(UnreadableFile):
            if (entry := quarantine.read(self._quarantine).get(self.gpu.uuid)) is not None:
                why = entry.detail
        if why is not None:
            self._standing.append(Finding(self.gpu.uuid, "quarantine", "kill", f"in {self._quarantine}: {why}"))

    def once(self, host: Host) -> Health:
        """Checks the host and the GPU once. host: the same object in all calls, because it remembers earlier values."""
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
        if sample.device == HOST and self._local_rank != 0:  # one report per node is enough
            return [finding for finding in found if finding.action != "note"]
        return found

    def _wait(self, until: float) -> None:
        """Waits until the time `until`, an XID, or a call of `look` or `close`."""
        while not self._wake.is_set() and (left := until - time.monotonic()) > 0:
            if self.gpu is None or not self.gpu.has_events:
                self._wake.wait(left)
            elif self.gpu.wait(min(left, XID_SECONDS)):
                return
        self._wake.clear()
