"""The stage graph: the live workers, the links between adjacent stages, and the message time on each link.

    graph = problem.graph
    graph.time(2, 0, 1)                          # message time from W(0, 2) to W(1, 3), or back
    graph.neighbours(Worker(1, 2))               # workers to exchange boundary tensors with, nearest first
    graph.peers(Worker(1, 2))                    # workers that can take over its micro-batches, nearest first
    graph.without(Worker(1, 2))                  # the graph after a death

The planner, the bounds and the validator read the graph's arrays. `network` is the same graph in networkx, for graph
algorithms. All times are in the problem's unit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from .links import Links
from .ops import Worker
from .problem_keys import ProblemKeys

if TYPE_CHECKING:
    import networkx as nx  # imported lazily at run time: it takes 0.1 s, and workers never need it


@dataclass(frozen=True, eq=False)
class StageGraph:
    """The graph of a problem's live workers (`Problem.graph`). Immutable; arrays are computed on first access.

    If the problem has no `links`, the graph is `uniform`: every link has infinite bandwidth and the latency `send`, or
    `send_rerouted` if the link leaves the pipeline."""

    problem: ProblemKeys

    @cached_property
    def links(self) -> Links | None:
        """The problem's links; None if the problem has no links."""
        p = self.problem
        return None if p.links is None else Links.of(p.links, p.pipelines, p.stages)

    # ---- message times

    @property
    def uniform(self) -> bool:
        """Whether the time of a message depends only on whether the message leaves its pipeline."""
        return self.links is None

    @property
    def near(self) -> float:
        """Message time within a pipeline of a uniform graph."""
        return self.problem.send

    @property
    def far(self) -> float:
        """Message time between two pipelines of a uniform graph."""
        return self.near if self.problem.send_rerouted is None else self.problem.send_rerouted

    def least(self, stage: int, *, within: bool = False) -> float:
        """The shortest message time between live workers of `stage` and the next stage.

        within: count only links within a pipeline. In this case, raises ValueError if the graph is not uniform and no
        pipeline has live workers at both stages."""
        here, there = self.problem.live[stage], self.problem.live[stage + 1]
        if self.uniform:
            return self.near if within else min(self.near, self.far)
        if within:
            return float(min(self.times[stage, d, d] for d in here if d in there))
        return float(self.times[stage][np.ix_(here, there)].min())

    @property
    def slowest(self) -> float:
        """The longest message time over all links, 0 if there are none. For a uniform graph, the message time within a
        pipeline."""
        return self.near if self.uniform else float(self.times.max(initial=0.0))

    def time(self, stage: Any, a: Any, b: Any) -> Any:
        """Message time between W(a, stage) and W(b, stage + 1), in either direction. Takes numbers or arrays."""
        if self.uniform:
            return np.where(np.equal(a, b), self.near, self.far)
        return self.times[stage, a, b]

    @cached_property
    def times(self) -> np.ndarray:
        """(P - 1, D, D) float64: [s, a, b] is the message time between W(a, s) and W(b, s + 1), dead workers
        included."""
        if self.links is None:
            return self.latency
        return self.latency + np.reshape(self.links.sizes, (-1, 1, 1)) / self.bandwidth

    @cached_property
    def latency(self) -> np.ndarray:
        """(P - 1, D, D) float64, indexed like `times`."""
        if self.links is None:
            D = self.problem.pipelines
            return np.tile(np.where(np.eye(D, dtype=bool), self.near, self.far), (self.problem.stages - 1, 1, 1))
        return self._links_as_arrays[0]

    @cached_property
    def bandwidth(self) -> np.ndarray:
        """(P - 1, D, D) float64, indexed like `times`: bytes per unit of time, inf if unknown."""
        return np.full_like(self.latency, np.inf) if self.links is None else self._links_as_arrays[1]

    @cached_property
    def _links_as_arrays(self) -> tuple[np.ndarray, np.ndarray]:
        assert self.links is not None
        names = sorted({host for row in self.links.hosts for host in row})
        table = np.array([[self.links.between(a, b) for b in names] for a in names])  # (hosts, hosts, 2)
        at = np.searchsorted(names, self.links.hosts)  # (D, P)
        pairs = table[at.T[:-1, :, None], at.T[1:, None, :]]
        return pairs[..., 0], pairs[..., 1]

    # ---- distances

    def host(self, worker: Worker) -> str | None:
        """The worker's host, None if the problem has no `links`."""
        return None if self.links is None else self.links.hosts[worker.pipeline][worker.stage]

    def between(self, a: Worker, b: Worker) -> float:
        """Message time between two workers of adjacent stages, in either direction."""
        first, second = (a, b) if a.stage < b.stage else (b, a)
        return float(self.time(first.stage, first.pipeline, second.pipeline))

    def distance(self, worker: Worker, peer: Worker) -> float:
        """Total message time of a micro-batch that `peer` runs instead of `worker`. In the forward and in the backward,
        the micro-batch travels from `worker`'s pipeline to `peer` and back."""
        d, s = worker
        before = float(self.time(s - 1, d, peer.pipeline)) if s > 0 else 0.0
        after = float(self.time(s, peer.pipeline, d)) if s < self.problem.stages - 1 else 0.0
        return 2 * (before + after)

    def peers(self, worker: Worker) -> list[Worker]:
        """The other live workers of the same stage, sorted by `distance`, then by pipeline. `worker` may be dead."""
        others = [Worker(d, worker.stage) for d in self.problem.live[worker.stage] if d != worker.pipeline]
        return sorted(others, key=lambda peer: (self.distance(worker, peer), peer))

    def neighbours(self, worker: Worker) -> list[Worker]:
        """The live workers of the previous and next stage, sorted by message time. Among equal times, workers of
        `worker`'s own pipeline come first."""
        d, s = worker
        found = [(float(self.time(s - 1, e, d)), e != d, Worker(e, s - 1)) for e in self._live(s - 1)]
        found += [(float(self.time(s, d, e)), e != d, Worker(e, s + 1)) for e in self._live(s + 1)]
        return [w for *_, w in sorted(found)]

    def _live(self, stage: int) -> tuple[int, ...]:
        return self.problem.live[stage] if 0 <= stage < self.problem.stages else ()

    # ---- paths

    def without(self, *dead: Worker) -> StageGraph:
        """The graph after more deaths. Raises ValueError if a stage has no live worker left."""
        return StageGraph(self.problem.replace(failed=[*self.problem.dead, *dead]))

    @cached_property
    def network(self) -> nx.DiGraph:
        """The graph in networkx, with up to D * D * (P - 1) edges.

        Nodes: the live workers. Attributes: stage, pipeline, speed, memory (maximum number of micro-batches in flight,
        inf for no limit), host and zone (None if unknown).

        Edges: from every worker to all workers of the next stage. Attributes: latency, bandwidth, time, and `leaves`
        ("zone" if the ends are in different zones, "host" if only their hosts differ, else None)."""
        import networkx as nx

        p, links, graph = self.problem, self.links, nx.DiGraph()
        for w in p.workers():
            host = self.host(w)
            zone = None if links is None or host is None else links.zones.get(host)
            speed, memory = p.speeds.get(w, 1.0), p.limit(w)
            graph.add_node(w, stage=w.stage, pipeline=w.pipeline, speed=speed, memory=memory, host=host, zone=zone)
        nodes = graph.nodes
        for s in range(p.stages - 1):
            latency, bandwidth, times = (a[s].tolist() for a in (self.latency, self.bandwidth, self.times))
            for a in p.live[s]:
                for b in p.live[s + 1]:
                    u = Worker(a, s)
                    v = Worker(b, s + 1)
                    leaves = next((key for key in ("zone", "host") if nodes[u][key] != nodes[v][key]), None)
                    graph.add_edge(
                        u, v, latency=latency[a][b], bandwidth=bandwidth[a][b], time=times[a][b], leaves=leaves
                    )
        return graph


__all__ = ["StageGraph"]
