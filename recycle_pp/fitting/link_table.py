"""The measured links between the job's hosts, for the stage graph (`Problem.graph`).

    table = LinkTable()
    table.place(Worker(0, 1), "node0")               # the host of a worker
    table.wanted(live)                               # {Worker(0, 0): {"node1": Worker(1, 1)}, ...}: pairs to measure
    table.measured("node0", {"node1": (0.0001, 1e9)})  # seconds one way, bytes per second
    table.slowest                                    # bytes per second of the slowest link
    table.describe(2, 2, sizes=[4e6], overhead=0.001, least=0.0002)     # the problem's key `links`, or None

One pair of workers measures the link between two hosts. One pair on a single host measures the link within a host, for
all hosts. If the job has only one host, nothing is measured and the graph is uniform. It is also uniform if the links
differ too little to change a plan (`describe`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

import networkx as nx
from recycle_schedules import Worker
from recycle_schedules.links import Link

MOST = 4  # maximum number of links that one worker measures; with NCCL each link needs a group
ALIKE = 2.0  # message times within this factor of each other count as equal

Hosts = frozenset[str]  # the two hosts of a link, or one host for the link within it


class LinkTable:
    def __init__(self) -> None:
        self._host: dict[Worker, str] = {}
        self._links: dict[Hosts, Link] = {}
        self._described: dict[tuple[Any, ...], dict[str, Any] | None] = {}

    def place(self, worker: Worker, host: str) -> None:
        """Records the host of a worker's new process."""
        if host:
            self._host[worker] = host
            self._described.clear()

    def measured(self, host: str, found: Mapping[str, tuple[float, float]]) -> None:
        """Records the links of this host. found: host at the other end -> (seconds one way, bytes per second)."""
        self._links |= {frozenset((host, other)): Link(*link) for other, link in found.items()}
        self._described.clear()

    def between(self, a: Worker, b: Worker) -> Link | None:
        """The link between the hosts of two workers; None if it was not measured."""
        return self._links.get(frozenset((self._host.get(a, ""), self._host.get(b, ""))))

    @property
    def slowest(self) -> float | None:
        """Bytes per second of the slowest measured link; None if none was measured."""
        return min((link.bandwidth for link in self._links.values()), default=None)

    def to_json(self) -> dict[str, Any]:
        """The table as JSON.

        hosts     worker -> its host
        measured  [host, host, seconds one way, bytes per second] for each link
        """
        measured = [[min(hosts), max(hosts), *link] for hosts, link in self._links.items()]
        return {"hosts": {str(w): host for w, host in sorted(self._host.items())}, "measured": sorted(measured)}

    def load(self, data: Mapping[str, Any]) -> None:
        """Adds the hosts and links from another coordinator's `to_json`."""
        for worker, host in data.get("hosts", {}).items():
            self.place(Worker.parse(worker), host)
        for a, b, *link in data.get("measured", ()):
            self.measured(a, {b: (link[0], link[1])})

    # -- pairs that measure ------------------------------------------------------------------------------------

    def wanted(self, live: Collection[Worker]) -> dict[Worker, dict[str, Worker]]:
        """The pairs of workers that should measure the links of new hosts: worker -> host at the other end -> worker on
        that host.

        The workers of a pair belong to neighbouring stages, and if possible to the same pipeline, because such workers
        are connected anyway.
        """
        at: dict[str, list[Worker]] = defaultdict(list)
        for worker in sorted(w for w in live if w in self._host):
            at[self._host[worker]].append(worker)
        known = {host for hosts in self._links for host in hosts}
        if len(at) < 2 or at.keys() <= known:
            return {}
        missing = [pair for pair in combinations(sorted(at), 2) if not set(pair) <= known]
        if not any(len(hosts) == 1 for hosts in self._links):
            missing = [(host, host) for host in sorted(at) if _neighbours(at[host], at[host])][:1] + missing
        wanted: dict[Worker, dict[str, Worker]] = defaultdict(dict)
        busy: Counter[Worker] = Counter()
        for a, b in missing:
            pairs = [(u, v) for u, v in _neighbours(at[a], at[b]) if busy[u] < MOST and busy[v] < MOST]
            if pairs:
                u, v = min(pairs, key=lambda uv: (uv[0].pipeline != uv[1].pipeline, busy[uv[0]] + busy[uv[1]]))
                wanted[u][b], wanted[v][a] = v, u
                busy.update((u, v))
        return dict(wanted)

    # -- for the planner ---------------------------------------------------------------------------------------

    def describe(
        self, pipelines: int, stages: int, sizes: Sequence[float], overhead: float, least: float
    ) -> dict[str, Any] | None:
        """The value of the problem's key `links`; None if the largest boundary tensor takes about as long on all links.

        sizes     bytes of the tensor that passes each boundary between stages
        overhead  seconds that a message takes in addition to the time on its link
        least     seconds; shorter message times count as `least`

        Hosts with fast links to each other form a zone.
        """
        asked = (pipelines, stages, *sizes, overhead, least)
        if asked not in self._described:  # cached, because this method is called after every commit
            self._described[asked] = self._describe(pipelines, stages, sizes, overhead, least)
        return self._described[asked]

    def _describe(
        self, pipelines: int, stages: int, sizes: Sequence[float], overhead: float, least: float
    ) -> dict[str, Any] | None:
        present = set(self._host.values())
        links = {hosts: link for hosts, link in self._links.items() if hosts <= present}
        time = {hosts: max(least, overhead + link.time(max(sizes, default=0.0))) for hosts, link in links.items()}
        between = {hosts: seconds for hosts, seconds in time.items() if len(hosts) == 2}
        if not between or max(time.values()) <= ALIKE * min(time.values()):
            return None
        zones = _zones(between)
        kinds: dict[str, list[Hosts]] = {"within_host": [], "between_hosts": [], "between_zones": []}
        for hosts in sorted(time, key=lambda hosts: (time[hosts], sorted(hosts))):
            kinds[_kind(hosts, zones)].append(hosts)
        usual = {kind: members[len(members) // 2] for kind, members in kinds.items() if members}
        plain = {
            hosts: {"latency": overhead + link.latency, "bandwidth": link.bandwidth} for hosts, link in links.items()
        }
        others = [
            hosts
            for kind, members in kinds.items()
            for hosts in members
            if not 1 / ALIKE <= time[hosts] / time[usual[kind]] <= ALIKE
        ]
        return {
            "hosts": [[self._host.get(Worker(d, s), "?") for s in range(stages)] for d in range(pipelines)],
            "zones": zones,
            "within_host": {"latency": overhead},  # replaced below if a link within a host was measured
            **{kind: plain[hosts] for kind, hosts in usual.items()},
            "measured": [[min(hosts), max(hosts), plain[hosts]] for hosts in others],
            "bytes": list(sizes),
        }


def _neighbours(here: Iterable[Worker], there: Iterable[Worker]) -> list[tuple[Worker, Worker]]:
    there = list(there)
    return [(u, v) for u in here for v in there if abs(u.stage - v.stage) == 1]


def _zones(between: Mapping[Hosts, float]) -> dict[str, str]:
    """The zone of each host, named after the zone's first host.

    Hosts are in the same zone if they are connected by links that are about as fast as the fastest link.

    between: the two hosts of a link -> seconds of a message
    """
    graph = nx.Graph()
    graph.add_nodes_from(host for hosts in between for host in hosts)
    nearest = min(between.values())
    graph.add_edges_from(tuple(hosts) for hosts, seconds in between.items() if seconds <= ALIKE * nearest)
    return {host: min(zone) for zone in nx.connected_components(graph) for host in sorted(zone)}


def _kind(hosts: Hosts, zones: Mapping[str, str]) -> str:
    if len(hosts) == 1:
        return "within_host"
    return "between_hosts" if len({zones[host] for host in hosts}) == 1 else "between_zones"
