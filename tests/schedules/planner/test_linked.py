"""Plans for hosts whose links have different speeds."""

import networkx as nx
from hypothesis import given
from hypothesis import strategies as st
from random_problems import linked, problems, relaxed, remainders
from recycle_schedules import Problem, Worker, plan
from recycle_schedules.analysis.simulate import simulate
from recycle_schedules.validate import validate


def two_hosts(latency, **keys):
    """Four pipelines, two on each host; W(0, 2) is dead."""
    links = {"hosts": [["a"] * 4, ["a"] * 4, ["b"] * 4, ["b"] * 4], "between_hosts": {"latency": latency}}
    shape = {"pipelines": 4, "stages": 4, "microbatches": 6, "failed": [(0, 2)]}
    return Problem(**(shape | {"links": links} | keys))


def takers(best):
    """For each worker, the number of the dead worker's micro-batches that it runs."""
    found = {}
    for op in best.ops:
        if op.kind == "F" and op.stage == 2 and op.microbatch[0] == 0:
            found[op.worker] = found.get(op.worker, 0) + 1
    return found


def test_if_the_other_host_is_far_all_micro_batches_stay_on_the_near_host():
    assert takers(plan(two_hosts(10.0))) == {Worker(1, 2): 6}


def test_if_the_other_host_is_equally_near_all_peers_share():
    assert len(takers(plan(two_hosts(0.0)))) == 3


def test_rerouting_uses_networkx_network_simplex(monkeypatch):
    asked = []
    simplex = nx.network_simplex
    monkeypatch.setattr(nx, "network_simplex", lambda graph: asked.append(graph) or simplex(graph))
    plan(two_hosts(1.0))
    assert asked and all(isinstance(graph, nx.MultiDiGraph) for graph in asked)


def test_a_slow_link_within_a_pipeline_lengthens_its_plan():
    links = {"hosts": [["a", "b"]], "between_hosts": {"latency": 0.5, "bandwidth": 4}, "bytes": 2}
    step = Problem(pipelines=1, stages=2, microbatches=1, backward="coupled", links=links)
    assert plan(step).makespan == 1 + 1 + 1 + 2 + 1 + 2, "expected F, message, F, B, message, B"


@relaxed
@given(linked())
def test_problems_with_links_get_valid_plans_above_the_bound(problem):
    best = plan(problem)
    assert validate(best) == []
    assert best.value >= best.lower_bound - 1e-6


@relaxed
@given(st.data())
def test_any_remainder_with_links_gets_a_valid_plan(data):
    left, _ = data.draw(remainders(plan(data.draw(linked()))))
    best = plan(left)
    assert validate(best) == []
    assert best.value >= best.lower_bound - 1e-6


@relaxed
@given(linked())
def test_planning_with_links_is_never_worse_than_ignoring_them(problem):
    """Both plans are timed with the message times of the links."""
    ignoring = simulate(plan(problem.replace(links=None)), links=problem.links)
    assert validate(ignoring) == [], "the simulated plan must be valid with the message times of the links"
    assert plan(problem).value <= ignoring.value * (1 + 1e-6)


@relaxed
@given(st.data())
def test_planning_a_remainder_with_links_is_never_worse_than_ignoring_them(data):
    left, _ = data.draw(remainders(plan(data.draw(linked()))))
    ignoring = simulate(plan(left.replace(links=None)), links=left.links)
    assert plan(left).value <= ignoring.value * (1 + 1e-6)


def test_ignoring_links_is_costly_if_they_differ_greatly():
    problem = two_hosts(10.0)
    assert simulate(plan(problem.replace(links=None)), links=problem.links).value > 2 * plan(problem).value


@relaxed
@given(problems(send=0.25, send_rerouted=0.75))
def test_links_equivalent_to_send_give_plans_that_the_judge_accepts(judge, problem):
    """One host per pipeline, with the latency `send` within a host and `send_rerouted` between hosts."""
    hosts = [[f"host {d}"] * problem.stages for d in range(problem.pipelines)]
    links = {"hosts": hosts, "within_host": {"latency": 0.25}, "between_hosts": {"latency": 0.75}}
    best = plan(problem.replace(send=0.0, send_rerouted=None, links=links))
    unlinked = plan(problem)
    assert judge.validate(unlinked.to_json()["problem"], [op.to_json() for op in best.ops])["errors"] == []
    assert best.value >= unlinked.lower_bound - 1e-6


def test_the_blocks_of_a_large_job_contain_only_pipelines_of_the_same_zone():
    zones = {f"host {d}": "west" if d % 2 else "east" for d in range(50)}
    links = {
        "hosts": [[f"host {d}"] * 16 for d in range(50)], "zones": zones,
        "between_hosts": {"latency": 0.1}, "between_zones": {"latency": 4.0},
    }  # fmt: skip
    problem = Problem(pipelines=50, stages=16, microbatches=220, failed=[(1, 2), (34, 7)], links=links)
    best = plan(problem)
    assert validate(best) == []
    a = best.arrays
    home = a.microbatch // 220
    moved = (a.microbatch >= 0) & (home != a.pipeline)
    assert moved.any() and not ((home - a.pipeline)[moved] % 2).any(), "no micro-batch may leave its zone"
