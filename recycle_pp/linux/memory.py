"""Memory of this machine, and of this process's control groups (cgroup v1 and v2).

host_memory()    # total bytes for all processes of this machine or container; None if unknown
free_memory()    # bytes that are available now; None if unknown
oom_kills()      # how many processes in this control group the out-of-memory killer has killed
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

PROC, GROUPS = Path("/proc"), Path("/sys/fs/cgroup")


class _Group(NamedTuple):
    folder: Path
    version: int

    def limit(self) -> float:
        """The memory limit in bytes; infinite if there is none. Raises OSError if the group lacks the file."""
        text = (self.folder / ("memory.limit_in_bytes" if self.version == 1 else "memory.max")).read_text().strip()
        return float("inf") if text == "max" else float(text)

    def used(self) -> float:
        """The memory used, in bytes. Raises OSError if the group lacks the file."""
        return float((self.folder / ("memory.usage_in_bytes" if self.version == 1 else "memory.current")).read_text())


def host_memory(proc: Path = PROC, groups: Path = GROUPS) -> float | None:
    """Bytes of memory of this machine, or the lowest limit of this process's control groups if that is lower. None if
    unknown."""
    found = [_meminfo(proc).get("MemTotal", float("inf"))]
    for group in _groups(proc, groups):
        with suppress(OSError, ValueError):
            found.append(group.limit())
    return _least(found)


def free_memory(proc: Path = PROC, groups: Path = GROUPS) -> float | None:
    """Bytes available on this machine, or in the fullest of this process's control groups if that is less. None if
    unknown.

    Considers only v2 groups, because the usage of a v1 group includes all cached files, which can be freed.
    """
    found = [_meminfo(proc).get("MemAvailable", float("inf"))]
    for group in _groups(proc, groups):
        with suppress(OSError, ValueError):
            if group.version == 2:
                found.append(group.limit() - group.used())
    return _least(found)


def oom_kills(proc: Path = PROC, groups: Path = GROUPS) -> int:
    """Number of processes that the out-of-memory killer has killed in this process's control group (v2); 0 if
    unknown."""
    for group in _groups(proc, groups):
        with suppress(OSError, ValueError, KeyError):
            if group.version == 2:
                lines = (group.folder / "memory.events").read_text().splitlines()
                return int(dict(line.split() for line in lines)["oom_kill"])
    return 0


def _meminfo(proc: Path) -> dict[str, float]:
    """/proc/meminfo as name -> bytes; {} if the file is unreadable."""
    with suppress(OSError, ValueError, IndexError):
        lines = (line.partition(":") for line in (proc / "meminfo").read_text().splitlines())
        return {name: int(value.split()[0]) * 1024.0 for name, _, value in lines}
    return {}


def _groups(proc: Path, groups: Path) -> Iterator[_Group]:
    """The memory control groups from this process's own group up to the root. In a container, the container's own group
    may be the root."""
    lines: list[str] = []
    with suppress(OSError):
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, version = (groups / "memory", 1) if controllers else (groups, 2)
        own = Path(name.strip("/"))
        for folder in dict.fromkeys((root / own, *(root / above for above in own.parents), root)):
            yield _Group(folder, version)


def _least(found: list[float]) -> float | None:
    least = min(found)
    return None if least == float("inf") else least
