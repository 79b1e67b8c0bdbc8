"""The links between workers: the problem's key `links`.

    links = Links.of({"hosts": [["a", "a"], ["b", "b"]], "between_hosts": {"latency": 1e-4, "bandwidth": 1e9},
                      "bytes": 4e6}, pipelines=2, stages=2)
    links.between("a", "b").time(4e6)        # 0.0041

A link is identified by the hosts at its ends. To describe every pair of workers separately, give each worker its own
host. Times are in the problem's unit (the trainer uses seconds), bandwidths in bytes per unit of time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

KINDS = ("within_host", "between_hosts", "between_zones")
KEYS = ("hosts", "zones", *KINDS, "measured", "bytes")


class Link(NamedTuple):
    """Latency and bandwidth of a link. A message of n bytes takes latency + n / bandwidth. Messages do not delay each
    other."""

    latency: float = 0.0
    bandwidth: float = math.inf

    def time(self, size: float) -> float:
        """Transfer time of a message of `size` bytes."""
        return self.latency + size / self.bandwidth


@dataclass(frozen=True)
class Links:
    """The hosts of all workers and the links between hosts.

    hosts[d][s]: the host of worker W(d, s). sizes[s]: bytes of a boundary tensor between stages s and s + 1."""

    hosts: tuple[tuple[str, ...], ...]
    zones: Mapping[str, str]
    within_host: Link
    between_hosts: Link
    between_zones: Link
    measured: Mapping[frozenset[str], Link]
    sizes: tuple[float, ...]

    @classmethod
    def of(cls, given: Any, pipelines: int, stages: int) -> Links:
        """Parse the value of the key `links`. Raises ValueError if it is invalid; the message starts with the key.

        hosts          D lists of P host names
        zones          {host: zone}; hosts without an entry share one zone
        within_host, between_hosts, between_zones
                       {"latency": time, "bandwidth": bytes per unit of time}; defaults: latency 0, infinite bandwidth,
                       between_zones like between_hosts
        measured       [[host, host, {"latency": ..., "bandwidth": ...}], ...]: overrides the three keys above
        bytes          bytes of a boundary tensor: one number, or one per stage boundary (P - 1); default 0
        """
        if not isinstance(given, Mapping):
            raise ValueError(f"links: expected an object with the keys {', '.join(KEYS)}, not {given!r}")
        unknown = sorted(str(key) for key in given if key not in KEYS)
        if unknown:
            raise ValueError(f"links: unknown key {unknown[0]!r}; known are {', '.join(KEYS)}")
        hosts = _hosts(given.get("hosts"), pipelines, stages)
        known = {host for row in hosts for host in row}
        kinds = {kind: _link(f"links.{kind}", given.get(kind, {})) for kind in KINDS}
        if "between_zones" not in given:
            kinds["between_zones"] = kinds["between_hosts"]
        measured = _measured(given.get("measured", []), known)
        zones = _zones(given.get("zones", {}), known)
        return cls(hosts, zones, **kinds, measured=measured, sizes=_sizes(given, stages))

    def of_pipelines(self, pipelines: Iterable[int]) -> dict[str, Any]:
        """The value of the key `links` for a problem with only these pipelines, in this order."""
        hosts = [list(self.hosts[d]) for d in pipelines]
        known = {host for row in hosts for host in row}
        measured = [(sorted(pair) * (3 - len(pair)), link) for pair, link in self.measured.items() if pair <= known]
        return {
            "hosts": hosts,
            "zones": {host: zone for host, zone in self.zones.items() if host in known},
            **{kind: _plain(getattr(self, kind)) for kind in KINDS},
            "measured": [[*pair, _plain(link)] for pair, link in measured],
            "bytes": list(self.sizes),
        }

    @property
    def slowest(self) -> float:
        """The longest message time over any link, used or not."""
        links = (self.within_host, self.between_hosts, self.between_zones, *self.measured.values())
        return max(link.time(max(self.sizes, default=0.0)) for link in links)

    def between(self, a: str, b: str) -> Link:
        """The link between two hosts, or within a host if a == b. Symmetric."""
        found = self.measured.get(frozenset((a, b)))
        if found is not None:
            return found
        if a == b:
            return self.within_host
        return self.between_hosts if self.zones.get(a) == self.zones.get(b) else self.between_zones


def _hosts(given: Any, pipelines: int, stages: int) -> tuple[tuple[str, ...], ...]:
    lists = isinstance(given, (list, tuple)) and all(isinstance(row, (list, tuple)) for row in given)
    if not lists or len(given) != pipelines or any(len(row) != stages for row in given):
        raise ValueError(f"links.hosts: expected {pipelines} lists of {stages} names, one name for each worker")
    for name in (name for row in given for name in row):
        _name("links.hosts", name)
    return tuple(tuple(row) for row in given)


def _zones(given: Any, known: set[str]) -> dict[str, str]:
    if not isinstance(given, Mapping):
        raise ValueError(f'links.zones: expected an object like {{"host": "zone"}}, not {given!r}')
    for host, zone in given.items():
        _known("links.zones", host, known)
        _name("links.zones", zone)
    return dict(given)


def _measured(given: Any, known: set[str]) -> dict[frozenset[str], Link]:
    if not isinstance(given, (list, tuple)):
        raise ValueError(f"links.measured: expected a list of [host, host, link], not {given!r}")
    found: dict[frozenset[str], Link] = {}
    for entry in given:
        if not isinstance(entry, (list, tuple)) or len(entry) != 3:
            raise ValueError(f"links.measured: an entry is [host, host, link], not {entry!r}")
        a, b = (_known("links.measured", host, known) for host in entry[:2])
        if frozenset((a, b)) in found:
            raise ValueError(f"links.measured: the link between {a} and {b} is given twice")
        found[frozenset((a, b))] = _link(f"links.measured of {a} and {b}", entry[2])
    return found


def _sizes(given: Mapping[str, Any], stages: int) -> tuple[float, ...]:
    value = given.get("bytes", 0)
    sizes = list(value) if isinstance(value, (list, tuple)) else [value] * (stages - 1)
    if len(sizes) != stages - 1:
        raise ValueError(f"links.bytes: expected {stages - 1} numbers, one per stage boundary, not {len(sizes)}")
    return tuple(_number("links.bytes", size) for size in sizes)


def _link(name: str, given: Any) -> Link:
    if not isinstance(given, Mapping) or set(given) - {"latency", "bandwidth"}:
        raise ValueError(f"{name}: expected an object with latency and bandwidth, not {given!r}")
    numbers = {key: _number(f"{name}.{key}", value) for key, value in given.items()}
    if numbers.get("bandwidth") == 0:
        raise ValueError(f"{name}.bandwidth: 0 is not above 0")
    return Link(**numbers)


def _plain(link: Link) -> dict[str, float]:
    return {"latency": link.latency} | ({"bandwidth": link.bandwidth} if math.isfinite(link.bandwidth) else {})


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{name}: {value!r} is not a finite number of at least 0")
    return float(value)


def _name(key: str, name: Any) -> str:
    if not isinstance(name, str) or not name:
        raise ValueError(f"{key}: {name!r} is not a name")
    return name


def _known(key: str, host: Any, known: set[str]) -> str:
    if host not in known:
        raise ValueError(f"{key}: {host!r} is not in links.hosts")
    return host


__all__ = ["Link", "Links"]
