"""Several nodes and the network between them: nodes that die, links that break, nodes that come."""

import pytest

from . import network, nodes
from .harness import Case, explain

_missing = network.missing()
pytestmark = [pytest.mark.timeout(180), pytest.mark.skipif(_missing is not None, reason=str(_missing))]


@pytest.mark.slow
def test_three_nodes_train_exactly_as_one(zygote, runs, tmp_path):
    case = Case("over three nodes", "3x2", deaths=0)
    with nodes.start(case, tmp_path, zygote) as job:
        outcome = job.outcome()
    assert outcome.code == 0, explain(outcome)
    runs.check_exact(outcome)
    assert {e["host"] for e in outcome.all("spawned")} == {"node0", "node1", "node2"}


def test_a_node_that_is_lost_changes_no_bit(zygote, runs, tmp_path):
    case = Case("a node is killed whole", "3x2", steps=20, deaths=2)
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


@pytest.mark.slow
@pytest.mark.torchrun
def test_under_torchrun_too(runs, tmp_path):
    case = Case("a node is killed whole, with torchrun", "3x2", steps=20, deaths=2)
    with nodes.start(case, tmp_path) as job:
        job.wait_for_step(3, 120)
        job.nodes[2].machine.kill()
        outcome = job.outcome()
    assert outcome.code == 0, explain(outcome)
    runs.check_exact(outcome)


@pytest.mark.parametrize(
    "cut",
    ["in both directions", *(pytest.param(way, marks=pytest.mark.slow) for way in ("what it sends", "what it gets"))],
)
def test_a_node_that_is_cut_off_is_given_up_and_does_no_harm_when_it_is_back(cut, zygote, runs, tmp_path):
    case = Case(f"a link is cut, {cut}", "3x2", steps=20, deaths=2)
    with nodes.start(case, tmp_path, zygote) as job:
        job.wait_for_step(3)
        lost, *others = job.nodes[2].machine, job.nodes[0].machine, job.nodes[1].machine
        if cut == "what it gets":
            for other in others:
                job.network.cut(other, lost, one_way=True)
        else:
            job.network.cut(lost, one_way=cut == "what it sends")
        job.wait_for_event("plan_adopted", nth=2)
        job.network.heal()
        outcome = job.outcome()
        code, said = job.nodes[2].agent.wait(30), job.nodes[2].agent.output
    assert outcome.code == 0, explain(outcome)
    runs.check_exact(outcome)
    assert {e["worker"] for e in outcome.all("death_detected")} == {"2.0", "2.1"}, explain(outcome)
    assert code != 0 and "lost the coordinator" in said


@pytest.mark.slow
def test_latency_and_loss_slow_a_job_down_and_nobody_is_given_up(zygote, runs, tmp_path):
    case = Case("in bad weather", "3x2", deaths=0)
    with nodes.start(case, tmp_path, zygote) as job:
        job.network.weather(delay=0.02, loss=0.02)
        outcome = job.outcome(120)
    assert outcome.code == 0, explain(outcome)
    runs.check_exact(outcome)


@pytest.mark.slow
def test_two_nodes_that_reach_only_the_third_one_do_not_stop_it(zygote, runs, tmp_path):
    case = Case("the link between two nodes is cut", "3x2", steps=20, deaths=2)
    with nodes.start(case, tmp_path, zygote) as job:
        job.wait_for_step(3)
        job.network.cut(job.nodes[1].machine, job.nodes[2].machine)
        outcome = job.outcome()
    assert outcome.code == 0, explain(outcome)
    runs.check_exact(outcome)
    assert {e["worker"] for e in outcome.all("death_detected")} == {"2.0", "2.1"}, explain(outcome)
