"""Judges the facts of a machine: pure functions, each of which makes a Check from a fact.

A fact is None if it was not read in time, because the disk, the name server or the driver behind it hangs.
"""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_address

from packaging.specifiers import SpecifierSet

from recycle_pp.comm.nccl.limits import LOCKED_MEMORY, OPEN_FILES, SHARED_MEMORY
from recycle_pp.telemetry.words import plural
from recycle_pp.wire.launch import joined
from recycle_pp.wire.messages.health import Finding

from .check import Check, Verdict, size
from .facts import Disk, Name, Route

SOFT_FILES = (
    1024  # lowest soft limit without a warning, Linux's default; a supervisor alone accepts about 400 connections
)
WRITE_RATE = 50e6  # bytes per second: 20 s for a gigabyte of a checkpoint
READ_RATE = 10e6  # bytes per second: 2.5 million tokens of four bytes
FREE = 5e9  # bytes for a run folder
SLOW_NAME = 1.0  # seconds


def version(name: str, needed: str, found: str | None) -> Check:
    """The check of a package's version. needed: ">=2.11,<2.14". found: None if the package is not installed."""
    if found is not None and SpecifierSet(needed).contains(found, prereleases=True):
        return Check(name, found, needed)
    advice = f"use Python {needed}" if name == "python" else f"pip install '{name}{needed}'"
    return Check(name, found or "not installed", needed, "broken", advice)


def torch_build(version: str, gpus: bool) -> Check:
    """The check of torch's build. version: torch's version, such as "2.13.0+cpu"."""
    build = version.partition("+")[2] or "default"
    if gpus and build == "cpu":
        advice = "workers would train on the CPU: install torch for CUDA, https://pytorch.org/get-started/locally"
        return Check("torch build", build, "one for this machine's GPUs", "warning", advice)
    return Check("torch build", build, "one for this machine's GPUs" if gpus else "any: no GPU here")


def shared_memory(free: int, gpus: bool) -> Check:
    """The check of shared memory, which only NCCL needs. free: bytes of /dev/shm."""
    value, limit = f"{size(free)} free", size(SHARED_MEMORY)
    if free >= SHARED_MEMORY or not gpus:
        return Check("shared memory", value, limit if gpus else "none without GPUs")
    return Check("shared memory", value, limit, "warning", "NCCL needs it: docker run --shm-size=1g")


def open_files(soft: int, hard: int) -> Check:
    value, limit = f"{soft}, at most {hard}", f"{SOFT_FILES}, at most {OPEN_FILES}"
    if soft >= SOFT_FILES and hard >= OPEN_FILES:
        return Check("open files", value, limit)
    advice = f"ulimit -n {OPEN_FILES}, or docker run --ulimit nofile={OPEN_FILES}"
    return Check("open files", value, limit, "warning", advice)


def locked_memory(most: float) -> Check:
    """The check of locked memory. most: bytes that a process may lock; infinite if no network card needs them."""
    if most >= LOCKED_MEMORY:
        return Check("locked memory", "enough", size(LOCKED_MEMORY))
    advice = "InfiniBand needs it: ulimit -l unlimited, or docker run --ulimit memlock=-1"
    return Check("locked memory", size(most), size(LOCKED_MEMORY), "warning", advice)


def ports(wanted: Sequence[int], busy: Sequence[int]) -> Check:
    limit = f"{' and '.join(map(str, wanted))} free"
    if not busy:
        return Check("ports", "free", limit)
    advice = "another program, perhaps a job, listens there: torchrun --master-port=PORT"
    return Check("ports", f"{' and '.join(map(str, busy))} in use", limit, "warning", advice)


def host_name(found: Name | None) -> Check:
    limit = f"an address in {SLOW_NAME:.0f} s"
    if found is None or found.seconds > SLOW_NAME:
        value = "no answer" if found is None else f"{found.seconds:.1f} s"
        return Check("host name", value, limit, "warning", "the name server is slow: add the name to /etc/hosts")
    if not found.address:
        return Check("host name", "unknown", limit, "warning", f"add {found.name} to /etc/hosts")
    return Check("host name", found.address, limit)


def coordinator(host: str, port: int, route: Route | None) -> Check:
    """The check of the route to HOST:PORT, the address of a coordinator that may not have started yet."""
    name, limit = "coordinator", f"{joined(host, port)} answers"
    if route is None or route.error:
        value = route.error if route else "no answer"
        return Check(name, value, limit, "broken", f"check the name, the route and the firewall: ping {host}")
    value = f"by {route.interface or '?'} ({route.address}), {'listens' if route.listens else 'does not listen yet'}"
    meant = host.startswith("127.") or host in ("localhost", "::1")
    if ip_address(route.address).is_loopback and not meant:
        advice = f"other nodes cannot reach workers there: set control.interface, or correct {host} in /etc/hosts"
        return Check(name, value, limit, "warning", advice)
    return Check(name, value, limit)


def run_disk(path: str, disk: Disk | None) -> Check:
    limit = f"{size(WRITE_RATE)}/s, {size(FREE)} free"
    if disk is None or disk.error:
        return _unusable("run folder", path, disk, limit)
    assert disk.rate is not None  # known, because at least one block is written
    value = f"writes {size(disk.rate)}/s, {size(disk.free)} free"
    if disk.rate < WRITE_RATE:
        return Check("run folder", value, limit, "warning", "checkpoints will be slow: put run.dir on a different disk")
    if disk.free < FREE:
        return Check("run folder", value, limit, "warning", f"checkpoints may not fit: df -h {path}")
    return Check("run folder", value, limit)


def data_disk(path: str, disk: Disk | None) -> Check:
    limit = f"{size(READ_RATE)}/s"
    if disk is None or disk.error:
        return _unusable("data", path, disk, limit)
    if disk.rate is None:
        return Check("data", "too small to measure", limit)
    value = f"reads {size(disk.rate)}/s"
    if disk.rate < READ_RATE:
        return Check("data", value, limit, "warning", f"copy {path} to a local disk")
    return Check("data", value, limit)


def _unusable(name: str, path: str, disk: Disk | None, limit: str) -> Check:
    if disk is None:
        return Check(name, "no answer", limit, "broken", f"its file system hangs: df -h {path}")
    return Check(name, disk.error, limit, "broken", f"ls -ld {path}")


def triton_cache(folder: str, files: int | None, gpus: bool) -> Check:
    limit = "some" if gpus else "none without GPUs"
    if files is None:
        return _unusable("triton cache", folder, None, limit)
    if files or not gpus:
        return Check("triton cache", plural(files, "file"), limit)
    advice = f"the first step will compile: copy {folder} from a machine that has trained, or expect a minute"
    return Check("triton cache", "empty", limit, "warning", advice)


def numba_cache(loops: int) -> Check:
    if loops:
        return Check("numba cache", plural(loops, "loop"), "some")
    advice = "the first plan will compile for up to half a minute: python -m recycle_pp.plan does it now"
    return Check("numba cache", "empty", "some", "warning", advice)


def driver(trouble: str) -> Check:
    """The check of the GPU driver. trouble: why the GPUs of this machine cannot be read."""
    if "nvidia-ml-py" in trouble:
        return Check("GPUs", trouble, "readable", "warning", "GPUs are not watched: pip install -U nvidia-ml-py")
    return Check("GPUs", trouble, "readable", "broken", "the driver does not work: nvidia-smi")


def device(name: str, device: str, figures: str, findings: Sequence[Finding]) -> Check:
    """The check of a device.

    name      "host" or "GPU 0"
    device    the GPU's UUID, or "host"
    figures   the value of the check if there is no finding
    findings  findings about all devices"""
    own = [finding for finding in findings if finding.device == device]
    if not own:
        return Check(name, figures, "no finding")
    verdict: Verdict = "broken" if {"drain", "kill"} & {finding.action for finding in own} else "warning"
    value = ", ".join(finding.signal for finding in own)
    return Check(name, value, "no finding", verdict, "; ".join(finding.detail for finding in own))
