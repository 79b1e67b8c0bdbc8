"""Reads samples of the host: memory errors, heat, network ports, and the kernel's log.

    host = Host()
    host.sample()              # Sample("host", uncorrected=0, ...)
    host.xids                  # [("0000:65:00", 79)]: (PCI address, XID) in the log since the previous sample

All values come from files. Values whose files are missing on a machine or in a container are left out. Memory errors
are read from /sys/devices/system/edac, heat from the processors' throttle counts, and ports from /sys/class/infiniband
and /sys/class/net. To read the kernel's log, /dev/kmsg, the process needs root or kernel.dmesg_restrict=0.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from statistics import mean

from .sample import Sample

HOST = "host"
_PORT_ERRORS = ("symbol_error", "port_rcv_errors", "link_error_recovery", "local_link_integrity_errors")
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:]+)[^)]*\): (\d+)")
_DISK = re.compile(
    r"I/O error, dev |Buffer I/O error|(EXT4-fs|XFS|BTRFS)\b.*\b(error|corrupt)|nvme\S*: (I/O .*timeout|.* is down)",
    re.IGNORECASE,
)


CLOCKS = 8  # about the number of cores whose clocks are read, so that a sample costs the same on a large machine


class Host:
    """The host of this process.

    sys   path of sysfs
    kmsg  path of the kernel's log
    """

    def __init__(self, sys: Path = Path("/sys"), kmsg: Path = Path("/dev/kmsg")) -> None:
        self._sys = sys
        self._log = _Log(kmsg)
        self._throttles = sorted(sys.glob("devices/system/cpu/cpu[0-9]*/thermal_throttle/*_throttle_count"))
        clocks = sorted(sys.glob("devices/system/cpu/cpu[0-9]*/cpufreq/scaling_cur_freq"))
        self._clocks = clocks[:: max(1, len(clocks) // CLOCKS)]
        self._throttled = _total(self._throttles)
        self.xids: list[tuple[str, int]] = []

    def sample(self) -> Sample:
        lines = self._log.new()
        self.xids = [(found[1], int(found[2])) for line in lines if (found := _XID.search(line))]
        before, self._throttled = self._throttled, _total(self._throttles)
        hot = before is not None and self._throttled is not None and self._throttled > before
        up, downs, errors = self._ports()
        return Sample(
            HOST,
            uncorrected=_total(self._sys.glob("devices/system/edac/mc/mc*/ue_count")),
            corrected=_total(self._sys.glob("devices/system/edac/mc/mc*/ce_count")),
            throttle=frozenset(["heat"] if hot else []),
            clock=_mhz(self._clocks),  # no `top_clock`, which a processor reaches only while a single core is busy
            ports=up,
            link_downs=downs,
            port_errors=errors,
            disk=tuple(line for line in lines if _DISK.search(line)),
        )

    def _ports(self) -> tuple[frozenset[str], int | None, int | None]:
        """(names of the ports that are up, number of times that any port went down, number of damaged packets and
        repaired links). None: unknown."""
        up = [path.parts[-4] for path in self._sys.glob("class/infiniband/*/ports/*/state") if "ACTIVE" in _text(path)]
        cards = [path.parent for path in self._sys.glob("class/net/*/device")]  # a virtual port has no device
        up += [card.name for card in cards if _text(card / "operstate") == "up"]
        counters = "class/infiniband/*/ports/*/counters"
        downs = [*self._sys.glob(f"{counters}/link_downed"), *(card / "carrier_down_count" for card in cards)]
        errors = [path for name in _PORT_ERRORS for path in self._sys.glob(f"{counters}/{name}")]
        errors += [card / "statistics/rx_crc_errors" for card in cards]
        return frozenset(up), _total(downs), _total(errors)


class _Log:
    """The kernel's log. `new` returns the lines since the last call; none if the log cannot be read."""

    def __init__(self, path: Path) -> None:
        self._file = -1
        with suppress(OSError):
            self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._file, 0, os.SEEK_END)  # raises for a pipe, which has no old lines

    def new(self) -> list[str]:
        out = []
        while self._file >= 0:
            try:
                record = os.read(self._file, 8192)  # /dev/kmsg returns one record per read: "6,339,5140900,-;text\n"
            except BrokenPipeError:  # records were overwritten before they were read
                continue
            except OSError:  # usually BlockingIOError: no more records
                break
            if not record:
                break
            out += [line.partition(";")[2] for line in record.decode(errors="replace").splitlines() if ";" in line]
        return out


def _total(paths: Iterable[Path]) -> int | None:
    """The sum of the numbers in these files; None if there are none."""
    numbers = [int(text) for path in paths if (text := _text(path)).isdecimal()]
    return sum(numbers) if numbers else None


def _mhz(paths: Iterable[Path]) -> float | None:
    """The mean of the clocks in these files, converted from kHz to MHz; None if there are none."""
    clocks = [int(text) / 1000 for path in paths if (text := _text(path)).isdecimal()]
    return mean(clocks) if clocks else None


def _text(path: Path) -> str:
    """The content of a file of sysfs; "" if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
