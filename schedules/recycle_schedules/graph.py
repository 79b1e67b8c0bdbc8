"""The workers and the links between them: a small networkx graph that planner, simulator and visualizer can read.

    graph = stage_graph(problem)
    route(graph, (1, 0), {2: Worker(0, 2)}, problem)     # the workers that a micro-batch passes
    peers(graph, Worker(1, 2))                           # live workers with the same parameters

Nodes are the live workers with `stage`, `pipeline`, `speed` and `memory` (most micro-batches in flight, inf: no
limit). Edges join workers of adjacent stages, with `latency` and `rerouted` (the link leaves the pipeline). A death
removes a node.
"""

from __future__ import annotations

from collections.abc import Mapping

import networkx as nx

from .ops import MicroBatch, Worker
from .problem import Problem


def stage_graph(problem: Problem) -> nx.DiGraph:
    """The graph of the live workers; edges from each stage to the next."""
    graph = nx.DiGraph()
    for w in problem.workers():
        speed = problem.speeds.get(w, 1.0)
        graph.add_node(w, stage=w.stage, pipeline=w.pipeline, speed=speed, memory=problem.limit(w))
    for s in range(problem.stages - 1):
        for a in problem.live[s]:
            for b in problem.live[s + 1]:
                u, v = Worker(a, s), Worker(b, s + 1)
                graph.add_edge(u, v, latency=problem.latency(u, v), rerouted=a != b)
    return graph


def peers(graph: nx.DiGraph, worker: Worker) -> list[Worker]:
    """The other live workers of its stage, in the order of their pipelines. `worker` itself may be dead."""
    return sorted(w for w, stage in graph.nodes(data="stage") if stage == worker.stage and w != worker)


def without(graph: nx.DiGraph, *dead: Worker) -> nx.DiGraph:
    """The graph after more deaths."""
    return graph.subgraph(set(graph) - set(dead)).copy()


def route(graph: nx.DiGraph, microbatch: MicroBatch, hosts: Mapping[int, Worker], problem: Problem) -> list[Worker]:
    """The workers that a micro-batch passes: `hosts` where it is re-routed, else its own pipeline's.

    ValueError if that is no path in the graph."""
    path = [hosts.get(s, Worker(microbatch[0], s)) for s in range(problem.stages)]
    if not nx.is_path(graph, path):
        raise ValueError(f"micro-batch {microbatch}: {' '.join(map(str, path))} is no path of live workers")
    return path
