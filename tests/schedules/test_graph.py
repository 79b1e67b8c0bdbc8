"""The stage graph: distances between workers, and message times."""

import networkx as nx
import pytest
from hypothesis import given, settings
from random_problems import linked
from recycle_schedules import Problem, Worker

DEAD = Problem(
    pipelines=4, stages=3, microbatches=2, failed=[(0, 1)], links={
        "hosts": [["a"] * 3, ["b"] * 3, ["a"] * 3, ["c"] * 3], "bytes": [10, 20],
        "zones": {"a": "west", "b": "west", "c": "east"},
        "within_host": {"latency": 0.1, "bandwidth": 100},
        "between_hosts": {"latency": 1},
        "between_zones": {"latency": 5},
    },
)  # fmt: skip


def test_message_times_follow_from_the_link_and_the_bytes_at_the_boundary():
    graph = DEAD.graph
    assert graph.time(0, 0, 2) == pytest.approx(0.1 + 10 / 100)
    assert graph.time(1, 0, 2) == pytest.approx(0.1 + 20 / 100)
    assert graph.time(1, 0, 1) == 1 and graph.time(1, 0, 3) == 5


def test_without_links_the_message_time_depends_only_on_whether_the_message_leaves_its_pipeline():
    graph = Problem(pipelines=2, stages=2, microbatches=1, send=0.1, send_rerouted=0.4).graph
    assert graph.time(0, 0, 0) == 0.1 and graph.time(0, 0, 1) == 0.4


def test_peers_are_sorted_nearest_first():
    assert DEAD.graph.peers(Worker(0, 1)) == [Worker(2, 1), Worker(1, 1), Worker(3, 1)]
    assert DEAD.graph.distance(Worker(0, 1), Worker(1, 1)) == 4, "expected two messages forward and two backward"


def test_neighbours_are_the_live_workers_of_the_adjacent_stages_nearest_first():
    found = DEAD.graph.neighbours(Worker(2, 2))
    assert found == [Worker(2, 1), Worker(1, 1), Worker(3, 1)]
    assert DEAD.graph.neighbours(Worker(0, 0)) == found


def test_a_death_removes_a_node():
    after = DEAD.graph.without(Worker(2, 1))
    assert set(DEAD.graph.network) - set(after.network) == {Worker(2, 1)}
    assert after.peers(Worker(0, 1)) == [Worker(1, 1), Worker(3, 1)]
    with pytest.raises(ValueError, match="no live worker at stage 1"):
        after.without(Worker(1, 1), Worker(3, 1))


@settings(deadline=None)
@given(linked())
def test_the_network_has_every_live_worker_and_every_link_between_adjacent_stages(problem):
    graph = problem.graph
    assert sorted(graph.network) == problem.workers() and nx.is_directed_acyclic_graph(graph.network)
    for worker in problem.workers():
        around = {*graph.network.predecessors(worker), *graph.network.successors(worker)}
        assert around == set(graph.neighbours(worker))
    for u, v, link in graph.network.edges(data=True):
        assert link["time"] == graph.time(u.stage, u.pipeline, v.pipeline)
        assert link["leaves"] is None or graph.network.nodes[u]["host"] != graph.network.nodes[v]["host"]
