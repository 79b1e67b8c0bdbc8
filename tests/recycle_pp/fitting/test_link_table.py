"""The table of measured links: few probes cover all hosts, and only differences that matter to a plan are used."""

from collections import Counter
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recycle_schedules import Problem, Worker
from recycle_schedules.graph import StageGraph

from recycle_pp.fitting.link_table import ALIKE, MOST, LinkTable

FAST = (0.0001, 1e9)  # seconds one way, bytes a second


@st.composite
def placements(draw):
    """A placement: worker -> host."""
    pipelines, stages = draw(st.integers(1, 4)), draw(st.integers(2, 4))
    hosts = st.sampled_from([f"node{k}" for k in range(draw(st.integers(1, 5)))])
    return {Worker(d, s): draw(hosts) for d, s in product(range(pipelines), range(stages))}


def table(placement):
    made = LinkTable()
    for worker, host in placement.items():
        made.place(worker, host)
    return made


def of_hosts(rows, links):
    """A table and the stage graph made from it."""
    placement = {Worker(d, s): host for d, row in enumerate(rows) for s, host in enumerate(row)}
    made = table(placement)
    for (a, b), link in links.items():
        made.measured(a, {b: link})
    shape = {"pipelines": len(rows), "stages": len(rows[0])}
    described = made.describe(**shape, sizes=[4e6] * (len(rows[0]) - 1), overhead=0.001, least=0.002)
    return described, Problem(**shape, microbatches=2, links=described).graph


@given(placements())
def test_each_pair_of_connected_hosts_is_measured_once_and_no_worker_measures_many_links(placement):
    wanted = table(placement).wanted(placement)
    probes = Counter()
    for worker, partners in wanted.items():
        assert len(partners) <= MOST
        for host, partner in partners.items():
            assert placement[partner] == host and abs(partner.stage - worker.stage) == 1
            assert wanted[partner][placement[worker]] == worker, "both ends measure"
            probes[frozenset((placement[worker], host))] += 1
    assert set(probes.values()) <= {2}, "one pair of workers measures a link, from both ends"
    neighbours = {
        frozenset((placement[u], placement[v])) for u, v in combinations(placement, 2) if abs(u.stage - v.stage) == 1
    }
    between = {pair for pair in neighbours if len(pair) == 2}
    if len(set(placement.values())) < 2:
        assert not wanted
    elif max(Counter(host for pair in between for host in pair).values(), default=0) <= MOST:
        assert probes.keys() >= between


def test_a_job_on_one_host_measures_nothing_and_has_a_uniform_graph():
    made = table({Worker(d, s): "here" for d in range(3) for s in range(4)})
    assert made.wanted([Worker(d, s) for d in range(3) for s in range(4)]) == {}
    assert made.describe(3, 4, sizes=[4e6] * 3, overhead=0.001, least=0.0) is None


def test_only_links_to_new_hosts_are_measured():
    rows = {Worker(d, s): f"node{d}" for d in range(3) for s in range(2)}
    made, live = table(rows), [w for w in rows if w.pipeline < 2]
    assert made.wanted(live)
    made.measured("node0", {"node1": FAST, "node0": FAST})
    assert made.wanted(live) == {}
    pairs = {frozenset((rows[w], host)) for w, of in made.wanted(rows).items() for host in of}
    assert pairs == {frozenset(("node0", "node2")), frozenset(("node1", "node2"))}


@given(st.lists(st.floats(1.0, ALIKE), min_size=4, max_size=4))
def test_noise_in_measurements_leaves_the_graph_uniform(noise):
    pairs = [("a", "a"), ("a", "b"), ("a", "c"), ("b", "c")]
    links = {pair: (0.003 * x, 1e12) for pair, x in zip(pairs, noise, strict=True)}
    described, graph = of_hosts([["a", "a"], ["b", "b"], ["c", "c"]], links)
    assert described is None and graph.uniform


def test_differences_far_below_the_shortest_op_leave_the_graph_uniform():
    links = {("a", "a"): (1e-6, 1e12), ("a", "b"): (0.0009, 1e12)}  # messages take 1 or 1.9 ms, `least` is 2 ms
    assert of_hosts([["a", "a"], ["b", "b"]], links)[0] is None


def test_a_far_host_is_a_zone_of_its_own_and_the_last_peer():
    far = (0.1, 1e8)
    links = {("a", "a"): FAST, ("a", "b"): FAST, ("a", "c"): far, ("b", "c"): far}
    described, graph = of_hosts([["a", "a"], ["b", "b"], ["c", "c"]], links)
    assert described["zones"] == {"a": "a", "b": "a", "c": "c"} and described["measured"] == []
    assert graph.between(Worker(0, 0), Worker(1, 1)) == pytest.approx(0.001 + 0.0001 + 4e6 / 1e9)
    assert graph.between(Worker(1, 1), Worker(2, 0)) == pytest.approx(0.001 + 0.1 + 4e6 / 1e8)
    assert graph.peers(Worker(0, 1)) == [Worker(1, 1), Worker(2, 1)]
    assert graph.network.edges[Worker(0, 0), Worker(2, 1)]["leaves"] == "zone"


def test_an_exceptional_link_has_its_own_times():
    pairs = combinations("abcd", 2)
    links = {("a", "a"): FAST} | {pair: (0.02, 1e9) for pair in pairs} | {("c", "d"): (0.1, 1e9)}
    described, graph = of_hosts([[host] * 2 for host in "abcd"], links)
    assert described["zones"] == dict.fromkeys("abcd", "a")
    assert [entry[:2] for entry in described["measured"]] == [["c", "d"]]
    assert graph.between(Worker(2, 0), Worker(3, 1)) == pytest.approx(0.001 + 0.1 + 4e6 / 1e9)


def test_a_host_without_workers_leaves_the_graph():
    links = {("a", "a"): FAST, ("a", "b"): FAST, ("a", "c"): (0.1, 1e8)}
    made = table({Worker(d, s): host for d, host in enumerate("abc") for s in range(2)})
    for (a, b), link in links.items():
        made.measured(a, {b: link})
    for s in range(2):
        made.place(Worker(2, s), "b")  # a new process on another host
    described = made.describe(3, 2, sizes=[0.0], overhead=0.0, least=0.001)
    assert described is None


@given(placements())
def test_another_coordinator_loads_the_same_table(placement):
    made, other = table(placement), LinkTable()
    hosts = sorted(set(placement.values()))
    for k, (a, b) in enumerate(combinations(hosts, 2)):
        made.measured(a, {b: (0.1 * k, 1e6)})
    other.load(made.to_json())
    assert other.to_json() == made.to_json()
    shape = {"pipelines": 4, "stages": 4, "sizes": [1e3] * 3, "overhead": 0.0, "least": 0.0}
    assert other.describe(**shape) == made.describe(**shape)


def test_any_subset_of_measured_links_makes_a_graph():
    """Some links between hosts may be unmeasured."""
    for known in range(1, 4):
        links = dict(list({("a", "b"): FAST, ("b", "c"): (0.2, 1e7), ("c", "d"): (0.01, 1e9)}.items())[:known])
        _, graph = of_hosts([[host] * 3 for host in "abcd"], links)
        assert isinstance(graph, StageGraph) and (graph.times >= 0).all()
