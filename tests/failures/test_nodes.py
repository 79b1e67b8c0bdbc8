"""Several nodes and the network between them: nodes that die, links that break, nodes that come."""

import pytest

from . import network, nodes
from .harness import Case, explain

_missing = network.missing()
pytestmark = [pytest.mark.timeout(180), pytest.mark.skipif(_missing is not None, reason=str(_missing))]


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
