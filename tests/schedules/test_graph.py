"""The stage graph."""

from itertools import pairwise

import networkx as nx
import pytest
from recycle_schedules import Problem, Worker
from recycle_schedules.graph import peers, route, stage_graph, without

WORKED = Problem(pipelines=3, stages=4, microbatches=6, memory_limit={"base": "1f1b", "extra": 2})


def test_the_stage_graph_knows_peers_routes_and_deaths():
    problem = WORKED.replace(send=0.1, send_rerouted=0.4)
    graph = stage_graph(problem)
    assert len(graph) == 12 and nx.is_directed_acyclic_graph(graph)
    assert peers(without(graph, Worker(1, 2)), Worker(1, 2)) == [Worker(0, 2), Worker(2, 2)]
    path = route(graph, (1, 0), {2: Worker(0, 2)}, problem)
    assert [graph.edges[e]["latency"] for e in pairwise(path)] == [0.1, 0.4, 0.4]
    with pytest.raises(ValueError, match="no path"):
        route(without(graph, Worker(1, 2)), (1, 0), {}, problem)
