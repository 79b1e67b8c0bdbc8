"""A table of a run under faults: deaths, stalls, goodput, and the growth of its processes.

usage = Usage()
usage.measure(pids)                     # from time to time, with the live workers
print(table(run, since, usage))
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress

from recycle_pp.linux.processes import ProcessSize, parent_of, process_size
from recycle_pp.wire.records import Step

from .events.deaths import DeathDetected
from .events.recovery import Restored, Resumed
from .events.workers import Rejoined
from .run_folder import RunFolder
from .run_reader import RunReader


class Usage:
    """The sizes of the largest worker and the largest supervisor over time."""

    def __init__(self) -> None:
        self.workers: list[ProcessSize] = []
        self.supervisors: list[ProcessSize] = []

    def measure(self, pids: Iterable[int]) -> None:
        """Adds a measurement.

        pids: process ids of workers on this machine. The parent of each is its supervisor."""
        workers, supervisors = [], []
        for pid in pids:
            with suppress(OSError, KeyError):  # the worker has just died
                worker, supervisor = process_size(pid), process_size(parent_of(pid))
                workers.append(worker)
                supervisors.append(supervisor)
        if workers:
            self.workers.append(ProcessSize(*map(max, zip(*workers, strict=True))))
            self.supervisors.append(ProcessSize(*map(max, zip(*supervisors, strict=True))))

    def rows(self) -> list[tuple[str, object]]:
        """Rows of the table: medians of the first and of the last quarter of the measurements. A leak shows as
        growth."""
        return [
            (f"{name}: memory, threads, files", f"{_early(sizes)} -> {_early(sizes[::-1])}")
            for name, sizes in (("largest worker", self.workers), ("largest supervisor", self.supervisors))
            if sizes
        ]


def _early(sizes: Sequence[ProcessSize]) -> str:
    """The medians of the first quarter of the measurements, as text."""
    some = sizes[: max(1, len(sizes) // 4)]
    mib, threads, descriptors = (_quantile(sorted(column), 0.5) for column in zip(*some, strict=True))
    return f"{mib:.0f} MiB, {threads:.0f}, {descriptors:.0f}"


def table(run: RunFolder, since: float = 0.0, usage: Usage | None = None) -> str:
    """The table as text. Leaves out events before `since` (Unix time), but counts all steps."""
    reader = RunReader(run)
    events = [event for event in reader.events() if event.time >= since]
    steps = reader.steps()
    stalls = sorted(event.stall_seconds for event in events if isinstance(event, Resumed))
    causes = Counter(event.cause for event in events if isinstance(event, DeathDetected))
    rows: list[tuple[str, object]] = [
        ("deaths", causes.total()),
        *((f"  {cause}", count) for cause, count in sorted(causes.items())),
        ("came back", sum(isinstance(event, Rejoined) for event in events)),
        ("restored from a checkpoint", sum(isinstance(event, Restored) for event in events)),
        ("recoveries", len(stalls)),
        ("stall, median", f"{1000 * _quantile(stalls, 0.5):.0f} ms"),
        ("stall, 99 %", f"{1000 * _quantile(stalls, 0.99):.0f} ms"),
        ("longest stall", f"{1000 * _quantile(stalls, 1.0):.0f} ms"),
        ("steps committed", len(steps)),
        ("goodput", f"{100 * _goodput(steps):.0f} % of an undisturbed run"),
        ("per live worker", f"{100 * _goodput(steps, per_worker=True):.0f} %"),
        *(usage.rows() if usage else []),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _goodput(steps: Sequence[Step], per_worker: bool = False) -> float:
    """The time that the steps would have taken at the median speed with all workers, divided by the time that they
    took.

    per_worker: whether to multiply the time of each step by the share of workers that were live
    """
    # without the first step, which includes the start of the job
    taken = [(line.step_seconds, line.live_workers) for line in steps[1:] if line.step_seconds and line.live_workers]
    most = max((live for _, live in taken), default=0)
    full = sorted(seconds for seconds, live in taken if live == most)
    if not full:
        return 0.0
    total = sum(seconds * (live / most if per_worker else 1.0) for seconds, live in taken)
    return _quantile(full, 0.5) * len(taken) / total


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
