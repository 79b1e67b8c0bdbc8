"""Elections among supervisors, or in etcd, when nodes and links fail. At most one side continues."""

import pytest

from tests.etcd import needs_etcd

from . import network, nodes
from .harness import Case, explain

_missing = network.missing()
pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.slow,
    pytest.mark.skipif(_missing is not None, reason=str(_missing)),
]
both = pytest.mark.parametrize("coordinator", ["embedded", pytest.param("etcd", marks=needs_etcd)])


@both
def test_the_node_of_the_coordinator_may_be_lost(coordinator, zygote, runs, tmp_path):
    case = Case("the coordinator's whole node is killed", "3x2", steps=20, overrides=("checkpoint.hf_at_end=true",))
    with nodes.start(case, tmp_path, zygote, coordinator) as job:
        job.wait_for_step(3)
        job.run.config.unlink()  # as on nodes without a shared folder
        job.nodes[0].machine.kill()
        outcome = job.outcome(nodes.BOUND, node=1)
        exported = (job.run.path / "hf" / "step-000020").exists()
    assert outcome.code == 0 and exported, explain(outcome)
    runs.check_exact(outcome)


@both
def test_the_others_continue_if_the_coordinators_node_is_cut_off(coordinator, zygote, runs, tmp_path):
    case = Case("the coordinator's node is cut off", "3x2", steps=20)
    with nodes.start(case, tmp_path, zygote, coordinator) as job:
        job.wait_for_step(3)
        job.network.cut(job.nodes[0].machine)
        outcome = job.outcome(nodes.BOUND, node=1)
        job.network.heal()
        code = job.nodes[0].agent.wait(nodes.BOUND)
        said = job.nodes[0].agent.output
    assert outcome.code == 0, explain(outcome)
    runs.check_exact(outcome)
    assert code != 0, said


def test_three_nodes_that_cannot_reach_each_other_all_stop(zygote, tmp_path):
    """No node has a majority, not even the coordinator's."""
    case = Case("every link is cut", "3x2", steps=60)
    with nodes.start(case, tmp_path, zygote) as job:
        job.wait_for_step(3)
        machines = [node.machine for node in job.nodes]
        job.network.cut(machines[0])
        job.network.cut(machines[1])
        for node in job.nodes:
            assert node.agent.wait(nodes.BOUND) != 0, job.output
        assert not job.events("finished")


@needs_etcd
def test_of_three_nodes_that_reach_only_etcd_one_continues(zygote, runs, tmp_path):
    case = Case("every link but those to etcd is cut", "3x2", steps=20)
    with nodes.start(case, tmp_path, zygote, "etcd") as job:
        job.wait_for_step(3)
        a, b, c = (node.machine for node in job.nodes)
        job.network.cut(a, b, c)
        job.network.cut(b, c)
        codes = [node.agent.wait(nodes.BOUND) for node in job.nodes]
        outcome = job.outcome(node=codes.index(0))
    assert sorted(code == 0 for code in codes) == [False, False, True], explain(outcome)
    runs.check_exact(outcome)


@needs_etcd
def test_without_etcd_steps_continue_and_recovery_from_a_death_waits(zygote, runs, tmp_path):
    case = Case("etcd is restarted", "3x2", steps=40)
    with nodes.start(case, tmp_path, zygote, "etcd") as job:
        job.wait_for_step(3)
        job.etcd.stop()
        job.wait_for_step(10)
        job.nodes[2].machine.kill()
        job.wait_for_event("death_detected", nth=2)
        step = max(line["step"] for line in job.run.lines(job.run.metrics))
        job.etcd.start()
        job.wait_for_step(step + 2)
        outcome = job.outcome(nodes.BOUND)
    assert outcome.code == 0, explain(outcome)
    runs.check_exact(outcome)
