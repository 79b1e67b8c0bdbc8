"""The machines that are up at each time: read from a file, or drawn at random.

    there = read("spot-trace.csv", seed=1)                  # counts, or machines by name; ValueError if malformed
    there = draw(machines=24, seconds=30 * DAY, mtbf=2 * HOUR, repair=20 * MINUTE, seed=1)
    for change in there.changes: change.at, change.machine, change.up

A file is a CSV with a header. Its first column is a time in hours, minutes or seconds. There are two kinds of file:

    hour,gpus_alive           number of machines from then on; the seed decides which machines die
    hour,machine,up           this machine is up (1) or down (0) from then on. Until its first row, if that is later
                              than the first time, it is in the other state

"""

from __future__ import annotations

import csv
import itertools
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0
UNITS = {"hour": HOUR, "minute": MINUTE, "second": 1.0}
LEAST_SHAPE = 0.01
"""Smallest shape of the Weibull distribution. With smaller ones its scale does not fit into a float."""


class Change(NamedTuple):
    """A machine goes up or down. at: seconds from the start of the trace."""

    at: float
    machine: int
    up: bool


@dataclass(frozen=True)
class Availability:
    """The machines that are up over time. Machines are numbered from 0. All except `absent` are up at the start."""

    machines: int
    seconds: float  # length of the trace
    changes: tuple[Change, ...]  # sorted by time
    absent: frozenset[int] = frozenset()

    @property
    def losses(self) -> int:
        return sum(not change.up for change in self.changes)

    def counts(self) -> Iterator[tuple[float, float, int]]:
        """Yields (start, end, number of machines that are up) for each interval between changes. Times in seconds."""
        live, since = self.machines - len(self.absent), 0.0
        for at, changes in itertools.groupby(self.changes, key=lambda change: change.at):
            if at > since:
                yield since, at, live
            live += sum(1 if change.up else -1 for change in changes)
            since = at
        if self.seconds > since:
            yield since, self.seconds, live

    @property
    def mean(self) -> float:
        """Mean number of machines that are up."""
        return sum((end - begin) * live for begin, end, live in self.counts()) / self.seconds


# ---------------------------------------------------------------------------------------------------------- files


def read(path: str | Path, *, seed: int = 0, machines: int | None = None) -> Availability:
    """Reads the availability from a CSV file of either kind.

    machines: number of machines. None: the largest count in the file, or the number of different machines in it.

    Raises:
        ValueError: the file is of neither kind, or has more machines than `machines`.
        OSError: the file cannot be read.
    """
    with Path(path).open(newline="") as file:
        rows = [row for row in csv.reader(file) if row]
    try:
        header = [cell.strip().lower() for cell in rows[0]]
        body = rows[1:]
        unit = UNITS[header[0].rstrip("s")]
        begin = float(body[0][0])
        times = [unit * (float(row[0]) - begin) for row in body]
        if sorted(times) != times or not 0 < times[-1] < math.inf:
            raise ValueError("times must increase and be finite")
        if len(header) == 3:
            return _of_machines(times, [(row[1].strip(), row[2].strip().lower()) for row in body], machines)
        counts = [int(float(row[1])) for row in body]
    except (ValueError, LookupError, OverflowError) as error:
        raise ValueError(
            f"--trace {path}: must be a CSV with the columns hour, count or hour, machine, up (also minute, second); "
            f"{error}"
        ) from None
    return _of_counts(times, counts, machines, random.Random(f"availability {seed}"))


def _of_counts(times: list[float], counts: list[int], machines: int | None, rng: random.Random) -> Availability:
    most = max(counts) if machines is None else machines
    if max(counts) > most or min(counts) < 0:
        raise ValueError(f"--machines {most}: the trace has between {min(counts)} and {max(counts)} machines")
    up = list(range(most))
    rng.shuffle(up)
    down = up[counts[0] :]
    del up[counts[0] :]
    absent, changes = frozenset(down), []
    for at, count in zip(times, counts, strict=True):
        while len(up) > count:
            down.append(up.pop(rng.randrange(len(up))))
            changes.append(Change(at, down[-1], False))
        while len(up) < count:
            up.append(down.pop(rng.randrange(len(down))))
            changes.append(Change(at, up[-1], True))
    return Availability(most, times[-1], tuple(changes), absent)


def _of_machines(times: list[float], rows: list[tuple[str, str]], machines: int | None) -> Availability:
    numbers = {name: k for k, name in enumerate(dict.fromkeys(name for name, _ in rows))}
    most = len(numbers) if machines is None else machines
    if most < len(numbers):
        raise ValueError(f"--machines {most}: the trace names {len(numbers)} machines")
    words = {"1": True, "up": True, "true": True, "0": False, "down": False, "false": False}
    up: dict[int, bool] = {}
    changes = []
    absent = set()
    for at, (name, word) in zip(times, rows, strict=True):
        machine, now = numbers[name], words[word]
        if machine not in up:
            up[machine] = now == (at == 0)
            if not up[machine]:
                absent.add(machine)
        if up[machine] != now:
            changes.append(Change(at, machine, now))
        up[machine] = now
    return Availability(most, times[-1], tuple(changes), frozenset(absent))


# --------------------------------------------------------------------------------------------------------- random


def draw(
    *, machines: int, seconds: float, mtbf: float, repair: float, seed: int = 0, shape: float = 1.0,
    groups: Iterable[tuple[int, float]] = (),
) -> Availability:  # fmt: skip
    """A random availability: machines fail independently, and groups of machines fail together.

    mtbf           mean seconds until a machine that is up fails
    repair         mean seconds until a failed machine, or its replacement, is up
    shape          shape of the Weibull distribution of times to failure. With 1 it is exponential; below 1, failures
                   come in bursts. Repair times are always exponential
    groups         (number of adjacent machines that fail together, mean seconds until such a group fails), for nodes,
                   racks or zones

    The same seed gives the same availability. Raises ValueError if `seconds` or `shape` is not finite, or if `seconds`
    is not above 0 or `shape` is below LEAST_SHAPE."""
    if not (0 < seconds < math.inf and LEAST_SHAPE <= shape < math.inf):
        raise ValueError(f"--days and --shape must be finite, --days above 0 and --shape at least {LEAST_SHAPE}")
    rng = random.Random(f"failures {seed}")
    down: list[list[tuple[float, float]]] = [[] for _ in range(machines)]
    for machine in range(machines):
        down[machine] += _downs(rng, seconds, mtbf, repair, shape)
    for size, between in groups:
        for first in range(0, machines, size):
            together = list(_downs(rng, seconds, between, repair, shape))
            for machine in range(first, min(first + size, machines)):
                down[machine] += together
    changes = []
    for machine, spans in enumerate(down):
        for begin, end in _united(spans):
            changes.append(Change(begin, machine, False))
            if end < seconds:
                changes.append(Change(end, machine, True))
    return Availability(machines, seconds, tuple(sorted(changes)))


def _downs(
    rng: random.Random, seconds: float, mtbf: float, repair: float, shape: float
) -> Iterator[tuple[float, float]]:
    """Yields random down times of a machine or of a group: (start, end) in seconds. Arguments as for `draw`."""
    scale = mtbf / math.gamma(1 + 1 / shape)
    now = 0.0
    while (now := now + rng.weibullvariate(scale, shape)) < seconds:
        back = now + rng.expovariate(1 / repair)
        yield now, back
        now = back


def _united(spans: list[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """The union of the spans, without overlaps."""
    end = begin = -1.0
    for a, b in sorted(spans):
        if a > end:
            if end >= 0:
                yield begin, end
            begin, end = a, b
        else:
            end = max(end, b)
    if end >= 0:
        yield begin, end
