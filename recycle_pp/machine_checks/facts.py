"""Reads what the rules judge. Each function takes a second or less, unless a disk, a name server or a driver hangs.

within(10.0, lambda: write_rate(folder))     # None if it takes longer
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import IO, NamedTuple, TypeVar

import recycle_schedules

from recycle_pp.comm.addresses import interface_of
from recycle_pp.health.host import Host
from recycle_pp.health.look import look
from recycle_pp.health.nvml import Gpu, MissingPackage, has_driver
from recycle_pp.health.sample import Sample
from recycle_pp.wire.messages.health import Finding

DISK_SECONDS = 0.5  # a disk is measured for this time, or until DISK_BYTES
DISK_BYTES = 64 << 20
BLOCK = 4 << 20  # bytes
MOST_FILES = 1000  # of a data folder, to find a large one
CONNECT_SECONDS = 3.0
T = TypeVar("T")


def within(seconds: float, read: Callable[[], T]) -> T | None:
    """The result of `read`, which runs in a thread; None if it takes longer. Then the thread is left behind.

    Errors that `read` can expect are part of its result."""
    found: list[T] = []
    thread = threading.Thread(target=lambda: found.append(read()), daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None


class Installed(NamedTuple):
    """
    requires  the ranges of recycle_pp's own package: {"python": ">=3.11", "torch": "<2.14,>=2.11"}; {} if it is not
              installed
    versions  those of the packages that were found
    """

    requires: dict[str, str]
    versions: dict[str, str]


def installed() -> Installed:
    try:
        about = metadata.distribution("recycle-pp")
    except metadata.PackageNotFoundError:
        return Installed({}, {})
    requires, versions = {"python": about.metadata["Requires-Python"]}, {"python": platform.python_version()}
    for line in about.requires or []:
        if ";" not in line and (parts := re.match(r"([\w.-]+)\s*(.*)", line)):  # "; extra == ..." is optional
            requires[parts[1]] = parts[2]
            with suppress(metadata.PackageNotFoundError):
                versions[parts[1]] = metadata.version(parts[1])
    return Installed(requires, versions)


class Disk(NamedTuple):
    """
    rate   bytes per second; None if the file is too small to measure
    free   bytes
    error  why nothing was measured: "Permission denied"
    """

    rate: float | None = None
    free: int = 0
    error: str = ""


def write_rate(folder: Path) -> Disk:
    """The rate of writes that reach the disk. The folder may be missing: its nearest parent that exists is measured.
    Leaves no file."""
    block = os.urandom(BLOCK)  # a file system that compresses would answer too fast

    def write(file: IO[bytes]) -> int:
        size = file.write(block)
        file.flush()
        os.fsync(file)
        return size

    try:
        place = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
        with tempfile.TemporaryFile(dir=place) as file:
            rate = _rate(lambda: write(file))
        return Disk(rate, shutil.disk_usage(place).free)
    except OSError as error:
        return Disk(error=error.strerror or str(error))


def read_rate(path: Path) -> Disk:
    """The rate of reads from a file, or from a large file of a folder. Removes what is read from the kernel's cache
    first."""
    try:
        large = max(islice(_files(path), MOST_FILES), default=None)
        if large is None:
            return Disk(error="no file")
        file = os.open(large[1], os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(file, 0, DISK_BYTES, os.POSIX_FADV_DONTNEED)
            return Disk(_rate(lambda: len(os.read(file, BLOCK))))
        finally:
            os.close(file)
    except OSError as error:
        return Disk(error=error.strerror or str(error))


def _files(path: Path) -> Iterator[tuple[int, str]]:
    """(bytes, path) of a file, or of all files of a folder."""
    if not path.is_dir():
        yield path.stat().st_size, str(path)
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):
                yield os.stat(os.path.join(folder, name)).st_size, os.path.join(folder, name)


def _rate(move: Callable[[], int]) -> float | None:
    """Bytes per second. move: reads or writes a block, returns its bytes."""
    total, began = 0, time.monotonic()
    while total < DISK_BYTES and time.monotonic() - began < DISK_SECONDS:
        size = move()
        total += size
        if size < BLOCK:
            break
    return total / (time.monotonic() - began) if total >= BLOCK else None


class Name(NamedTuple):
    """A host name, and the seconds in which it was resolved to an address; "" if it was not."""

    name: str
    address: str
    seconds: float


def host_name() -> Name:
    name, began, address = socket.gethostname(), time.monotonic(), ""
    with suppress(OSError):
        address = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    return Name(name, address, time.monotonic() - began)


def busy_ports(ports: Sequence[int]) -> list[int]:
    """Those at which another program of this machine listens."""
    busy = []
    for port in ports:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind(("", port))
            except OSError:
                busy.append(port)
    return busy


class Route(NamedTuple):
    """The way to the coordinator's host.

    address    of this machine, on that way: workers listen there, unless control.interface is set
    interface  that has this address; "" if none has
    listens    whether the coordinator's port is open already
    error      why the host does not answer; "" if it does
    """

    address: str = ""
    interface: str = ""
    listens: bool = False
    error: str = ""


def route_to(host: str, port: int) -> Route:
    try:
        try:
            with socket.create_connection((host, port), CONNECT_SECONDS) as sock:
                address, listens = sock.getsockname()[0], True
        except ConnectionRefusedError:  # the host answers; before a job nothing listens there
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                sock.connect((host, port))  # sends nothing
                address, listens = sock.getsockname()[0], False
    except OSError as error:
        return Route(error=error.strerror or str(error))
    return Route(address, interface_of(address), listens)


def compiled_loops() -> int:
    """The number of the planner's loops in numba's cache."""
    package = Path(recycle_schedules.__file__).parent / "compiled"
    folder = os.environ.get("NUMBA_CACHE_DIR")
    found = Path(folder).glob(f"{package.name}_*/*.nbi") if folder else (package / "__pycache__").glob("*.nbi")
    return len(list(found))


class Hardware(NamedTuple):
    """
    host      one look at the host
    gpus      name of each GPU, and one look at it
    findings  what is wrong, of all devices
    trouble   why GPUs of this machine are not read; "" if there are none, or if they are
    """

    host: Sample
    gpus: list[tuple[str, Sample]]
    findings: list[Finding]
    trouble: str = ""


def hardware() -> Hardware:
    trouble, gpus = "", []
    try:
        gpus = Gpu.all()
        if not gpus and has_driver() and "CUDA_VISIBLE_DEVICES" not in os.environ:
            trouble = "the driver reports none"
    except MissingPackage:
        trouble = "nvidia-ml-py is not installed"
    samples, findings = look(Host(), gpus)
    return Hardware(samples[0], list(zip([gpu.name for gpu in gpus], samples[1:], strict=True)), findings, trouble)
