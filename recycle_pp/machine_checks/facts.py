"""Reads the facts that rules.py judges. Each function takes a second or less, unless a disk, a name server or a driver
hangs.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from itertools import combinations, islice
from pathlib import Path
from typing import IO, NamedTuple, TypeVar

from recycle_pp.health.host import Host
from recycle_pp.health.look import look
from recycle_pp.health.nvml import Gpu, MissingPackage, has_driver, hides_gpus
from recycle_pp.health.sample import Sample
from recycle_pp.health.setup import Pair, Setup
from recycle_pp.linux.addresses import interface_of
from recycle_pp.wire.messages.health import Finding

DISK_SECONDS = 0.5  # a disk is measured for this time, or until DISK_BYTES were moved
DISK_BYTES = 64 << 20
BLOCK = 4 << 20  # bytes
MOST_FILES = 1000  # number of files of a data folder from which the largest is chosen
CONNECT_SECONDS = 3.0
T = TypeVar("T")


def within(seconds: float, read: Callable[[], T]) -> T | None:
    """The result of `read`, which runs in a thread; None if it takes longer than `seconds`. The thread then continues,
    and its result is dropped. Raises what `read` raises."""
    found: Future[T] = Future()

    def answer() -> None:
        try:
            found.set_result(read())
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=answer, daemon=True).start()
    wait([found], seconds)
    return found.result() if found.done() else None


class Installed(NamedTuple):
    """The packages that recycle_pp requires.

    requires  ranges of versions: {"python": ">=3.11", "torch": "<2.14,>=2.11"}; {} if recycle_pp is not installed
    versions  installed versions of the packages that were found
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
    """A measurement of a disk.

    rate   bytes per second; None if the file is too small to measure
    free   bytes
    error  why nothing was measured: "Permission denied"
    best   rate of the fastest block, which other programs on this machine have disturbed least
    """

    rate: float | None = None
    free: int = 0
    error: str = ""
    best: float | None = None


def write_rate(folder: Path) -> Disk:
    """The rate of writes that reach the disk. If the folder is missing, its nearest existing parent is measured. Leaves
    no file."""
    block = os.urandom(BLOCK)  # random, because a file system may compress other data and seem too fast

    def write(file: IO[bytes]) -> int:
        size = file.write(block)
        file.flush()
        os.fsync(file)
        return size

    try:
        place = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
        with tempfile.TemporaryFile(dir=place) as file:
            rate, best = _rates(lambda: write(file))
        return Disk(rate, shutil.disk_usage(place).free, best=best)
    except OSError as error:
        return Disk(error=error.strerror or str(error))


def read_rate(path: Path) -> Disk:
    """The rate of reads from a file, or from the largest of a folder's first MOST_FILES files. First evicts the file's
    data from the kernel's cache."""
    try:
        large = max(islice(_files(path), MOST_FILES), default=None)
        if large is None:
            return Disk(error="no file")
        file = os.open(large[1], os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(file, 0, DISK_BYTES, os.POSIX_FADV_DONTNEED)
            rate, best = _rates(lambda: len(os.read(file, BLOCK)))
            return Disk(rate, best=best)
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


def _rates(move: Callable[[], int]) -> tuple[float | None, float | None]:
    """(mean rate, rate of the fastest block), in bytes per second; None if less than a block was moved.

    move: reads or writes a block, and returns its number of bytes
    """
    total, best = 0, None
    began = now = time.monotonic()
    while total < DISK_BYTES and now - began < DISK_SECONDS:
        before, size = now, move()
        now = time.monotonic()
        total += size
        if size < BLOCK:
            break
        best = max(best or 0.0, size / (now - before))
    return (total / (now - began) if total >= BLOCK else None), best


class Name(NamedTuple):
    """A host name, its address ("" if it was not resolved), and the seconds that the resolution took."""

    name: str
    address: str
    seconds: float


def host_name() -> Name:
    name, began, address = socket.gethostname(), time.monotonic(), ""
    with suppress(OSError, UnicodeError):  # UnicodeError: not a possible name
        address = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    return Name(name, address, time.monotonic() - began)


def busy_ports(ports: Sequence[int]) -> list[int]:
    """The ports among `ports` on which another program on this machine listens."""
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
    """The route to the coordinator's host.

    address    this machine's address on the route. Workers listen there, unless control.interface is set
    interface  the interface with this address; "" if there is none
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
        except ConnectionRefusedError:  # the host answers; before a job, nothing listens on the port
            family, _, _, _, at = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as sock:
                sock.connect(at)  # sends nothing
                address, listens = sock.getsockname()[0], False
    except (OSError, UnicodeError) as error:  # UnicodeError: not a possible name
        return Route(error=getattr(error, "strerror", None) or str(error))
    return Route(address, interface_of(address), listens)


def compiled_loops() -> int:
    """The number of the planner's loops in numba's cache."""
    spec = find_spec("recycle_schedules")  # does not import the package, which would import numpy
    assert spec is not None and spec.origin is not None
    package = Path(spec.origin).parent / "compiled"
    folder = os.environ.get("NUMBA_CACHE_DIR")
    found = Path(folder).glob(f"{package.name}_*/*.nbi") if folder else (package / "__pycache__").glob("*.nbi")
    return len(list(found))


class Hardware(NamedTuple):
    """The state of the host and its GPUs, read once.

    host      the reading of the host
    gpus      (name, reading) of each GPU
    findings  faults of all devices
    trouble   why the GPUs of this machine cannot be read; "" if there are none, or if they were read
    setups    the setup of each GPU
    pairs     (0, 1) -> how these GPUs are connected
    """

    host: Sample
    gpus: list[tuple[str, Sample]]
    findings: list[Finding]
    trouble: str = ""
    setups: Sequence[Setup] = ()
    pairs: Mapping[tuple[int, int], Pair] = {}


def hardware() -> Hardware:
    trouble, gpus = "", []
    try:
        gpus = Gpu.all()
        if not gpus and has_driver() and not hides_gpus():
            trouble = "the driver reports none"
        if silent := Gpu.silent():
            trouble = f"GPU {', '.join(silent)} does not answer"
    except MissingPackage as problem:
        trouble = str(problem)
    samples, findings = look(Host(), gpus)
    names = list(zip([gpu.name for gpu in gpus], samples[1:], strict=True))
    pairs = {(a, b): gpus[a].pair(gpus[b]) for a, b in combinations(range(len(gpus)), 2)}
    return Hardware(samples[0], names, findings, trouble, [gpu.setup() for gpu in gpus], pairs)
