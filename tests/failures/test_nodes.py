"""Jobs on several nodes: lost nodes, broken links, new nodes."""

import json
import signal
from collections import Counter

import pytest
from recycle_schedules import Worker

from . import network, nodes
from .harness import Case, explain

_missing = network.missing()
pytestmark = [pytest.mark.timeout(400), pytest.mark.skipif(_missing is not None, reason=str(_missing))]


@pytest.mark.slow
def test_three_nodes_train_exactly_like_one(zygote, runs, tmp_path):
    case = Case("over three nodes", "3x2", deaths=0)
    with nodes.start(case, tmp_path, zygote) as job:
        outcome = job.outcome()
    assert outcome.code == 0, explain(outcome)
    runs.check_exact(outcome)
    assert {e["host"] for e in outcome.all("spawned")} == {"node0", "node1", "node2"}


@pytest.mark.slow  # quick counterpart: test_a_new_node_takes_the_place_of_a_lost_one
def test_the_loss_of_a_node_changes_no_bit(zygote, runs, tmp_path):
    case = Case("a whole node is killed", "3x2", steps=20, deaths=2)
    with nodes.start(case, tmp_path, zygote) as job:
        job.wait_for_step(3)
        job.nodes[2].machine.kill()
        outcome = job.outcome()
    assert outcome.code == 0, explain(outcome)
    runs.check_exact(outcome)
    assert {(e["worker"], e["cause"]) for e in outcome.all("death_detected")} == {
        ("2.0", "node_loss"),
        ("2.1", "node_loss"),
    }, explain(outcome)


@pytest.mark.parametrize("far", [pytest.param(far, marks=pytest.mark.slow) for far in (True, False)])
def test_the_ops_of_a_dead_worker_go_to_the_nearest_peer(far, zygote, tmp_path):
    """Node 2 is 0.1 s away (`far`), or as near to node 0 as node 1. The plan uses measured latencies."""
    emulated = ("emulate=sleep", *(f"emulate.{kind}=0.005" for kind in "FIWO"))
    overrides = (*emulated, "numerics.reproducible=false", "parallel.microbatches=6", "+fail_at=6:0.1")
    case = Case(f"node 2 is {'far' if far else 'near'}", "3x2", overrides, steps=20)
    with nodes.start(case, tmp_path, zygote, far={2: 0.1} if far else {}) as job:
        outcome = job.outcome()
        assert outcome.code == 0, explain(outcome)
        profile = json.loads(job.run.profile.read_text())
    seconds = {(a, b): latency for a, b, latency, _ in profile["links"]["measured"]}
    assert len(seconds) == 4, "expected one latency within hosts and three between hosts"
    assert (seconds["node0", "node2"] >= 0.1) == (seconds["node1", "node2"] >= 0.1) == far
    assert seconds["node0", "node1"] < 0.03

    last = outcome.traces[max(outcome.traces)]
    assert set(last.problem.dead) == {Worker(0, 1)}
    shares = Counter(str(op.worker) for op in last.ops if op.kind == "F" and op.stage == 1 and op.microbatch[0] == 0)
    assert shares["1.1"] >= 5 if far else shares == {"1.1": 3, "2.1": 3}, shares
    network = last.problem.graph.network
    hosts = {str(w): about["host"] for w, about in network.nodes(data=True)}
    assert not far or (hosts["2.0"], network.edges[Worker(0, 0), Worker(2, 1)]["leaves"]) == ("node2", "zone")


@pytest.mark.slow  # quick counterpart: test_exit_barrier.py cuts a node off
@pytest.mark.parametrize("cut", ["in both directions", "what it sends", "what it receives"])
def test_a_node_that_is_cut_off_is_given_up_and_changes_no_bit_when_the_link_works_again(cut, zygote, runs, tmp_path):
    case = Case(f"a link is cut, {cut}", "3x2", steps=20, deaths=2)
    with nodes.start(case, tmp_path, zygote) as job:
        job.wait_for_step(3)
        lost, *others = job.nodes[2].machine, job.nodes[0].machine, job.nodes[1].machine
        if cut == "what it receives":
            for other in others:
                job.network.cut(other, lost, one_way=True)
        else:
            job.network.cut(lost, one_way=cut == "what it sends")
        job.wait_for_event("plan_adopted", nth=2)
        job.network.heal()
        outcome = job.outcome()
    assert outcome.code == 0, explain(outcome)
    runs.check_exact(outcome)
    assert {e["worker"] for e in outcome.all("death_detected")} == {"2.0", "2.1"}, explain(outcome)


@pytest.mark.slow
def test_a_node_that_stays_cut_off_stops_and_reports_the_lost_majority(zygote, tmp_path):
    case = Case("a node stays cut off", "3x2", steps=10_000)
    with nodes.start(case, tmp_path, zygote) as job:
        job.wait_for_step(3)
        job.network.cut(job.nodes[2].machine)
        assert job.nodes[2].agent.wait(90) == 1, job.output
        said = job.nodes[2].agent.output
        assert "lost the coordinator" in said and "majority" in said
        assert "Traceback" not in said
        job.wait_for_step(max(line["step"] for line in job.run.lines(job.run.metrics)) + 3)


@pytest.mark.slow
def test_latency_and_loss_slow_a_job_down_but_cost_no_worker(zygote, runs, tmp_path):
    case = Case("in bad weather", "3x2", deaths=0)
    with nodes.start(case, tmp_path, zygote) as job:
        job.network.weather(delay=0.02, loss=0.02)
        outcome = job.outcome()
    assert outcome.code == 0, explain(outcome)
    runs.check_exact(outcome)


@pytest.mark.slow
def test_a_network_on_which_a_sum_takes_much_longer_than_the_suspicion_costs_no_worker(zygote, runs, tmp_path):
    """Bytes keep arriving, so the wait does not count as a hang."""
    case = Case("over a slow network", "3x2", steps=3, overrides=("control.suspicion=2", "model=small"), deaths=0)
    with nodes.start(case, tmp_path, zygote) as job:
        job.network.weather(rate=3e5)
        outcome = job.outcome()
    assert outcome.code == 0, explain(outcome)
    runs.check_exact(outcome)
    assert min(line["step_seconds"] for line in outcome.metrics) > 6 and not outcome.all("renewed")


@pytest.mark.slow
def test_two_nodes_that_reach_only_the_third_one_do_not_stop_the_job(zygote, runs, tmp_path):
    case = Case("the link between two nodes is cut", "3x2", steps=20, deaths=2)
    with nodes.start(case, tmp_path, zygote) as job:
        job.wait_for_step(3)
        job.network.cut(job.nodes[1].machine, job.nodes[2].machine)
        outcome = job.outcome()
    assert outcome.code == 0, explain(outcome)
    runs.check_exact(outcome)
    assert {e["worker"] for e in outcome.all("death_detected")} == {"2.0", "2.1"}, explain(outcome)


def test_a_new_node_takes_the_place_of_a_lost_one(zygote, runs, tmp_path):
    case = Case("a node is lost, another one joins", "3x2", steps=60, deaths=2)
    with nodes.start(case, tmp_path, zygote) as job:
        job.wait_for_step(3)
        job.nodes[2].machine.kill()
        job.wait_for_event("plan_adopted", nth=2)
        newcomer = job.join()
        job.wait_for_event("rejoined", nth=2)
        outcome = job.outcome()
        assert newcomer.agent.wait(30) == 0, job.output
    assert outcome.code == 0, explain(outcome)
    runs.check_exact(outcome)
    assert {e["worker"] for e in outcome.all("rejoined")} == {"2.0", "2.1"}, explain(outcome)
    assert [e["host"] for e in outcome.all("spawned")].count("node3") == 2


@pytest.mark.slow  # quick counterpart: test_supervisors.py
def test_all_nodes_are_drained_one_after_the_other_and_replaced(zygote, runs, tmp_path):
    """As in rolling maintenance. The coordinator's node is drained last."""
    export = ("checkpoint.hf_at_end=true",)
    case = Case("nodes are drained and replaced", "3x2", steps=150, overrides=export, deaths=6)
    with nodes.start(case, tmp_path, zygote) as job:
        job.wait_for_step(3)
        for times, number in enumerate((1, 2, 0), 1):
            job.nodes[number].agent.signal(signal.SIGTERM)
            job.wait_for_event("evicted", nth=2 * times)
            job.nodes[number].agent.wait(60)
            if number:
                job.join()
                job.wait_for_event("rejoined", nth=2 * times)
        outcome = job.outcome(node=3)
        assert outcome.code == 0, explain(outcome)
        exported = (job.run.path / "hf" / "step-000150").exists()
    runs.check_exact(outcome)
    assert len(outcome.all("evicted")) == 6 and exported, explain(outcome)


@pytest.mark.slow
def test_a_rejected_node_prints_the_reason_and_a_different_numpy_version_is_named_at_the_start(zygote, tmp_path):
    (about := tmp_path / "numpy-9.9.9.dist-info").mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 9.9.9\n")
    case = Case("new nodes that cannot join", "3x2", steps=10_000)
    with nodes.start(case, tmp_path, zygote, environments={1: {"PYTHONPATH": str(tmp_path)}}) as job:
        job.wait_for_step(1)
        nowhere = f"{job.nodes[0].machine.address}:9"
        for told, newcomer in {
            "no node of the job is lost": job.join(),
            "does not accept this RECYCLE_TOKEN": job.join(token="of somebody else, who is a stranger"),
            f"no job answers at {nowhere}": job.join(where=nowhere),
        }.items():
            assert newcomer.agent.wait(60) == 2, newcomer.agent.output
            assert told in newcomer.agent.output
            assert "Traceback" not in newcomer.agent.output
        assert "numpy: 9.9.9 on node1 (needed: " in job.nodes[0].agent.output
