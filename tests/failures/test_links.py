"""Links between live nodes are cut, reject packets or lose them. At most one node leaves, soon, and no bit changes."""

from itertools import pairwise

import pytest

from . import network, nodes
from .harness import Case, explain

_missing = network.missing()
pytestmark = [pytest.mark.timeout(300), pytest.mark.skipif(_missing is not None, reason=str(_missing))]
slow = pytest.mark.slow


def longest_gap(outcome):
    """Longest time between two commits, seconds."""
    return max(after["time"] - before["time"] for before, after in pairwise(outcome.metrics))


@pytest.mark.parametrize("suspicion", [1, *(pytest.param(n, marks=slow) for n in (5, 10))])
def test_after_a_cut_one_of_the_two_nodes_leaves_within_suspicion_plus_two_seconds(suspicion, zygote, runs, tmp_path):
    overrides = (f"control.suspicion={suspicion}",)
    case = Case("the link between two nodes is cut", "3x2", overrides, steps=60, deaths=2)
    with nodes.start(case, tmp_path, zygote) as job:
        job.wait_for_step(10)
        job.network.cut(job.nodes[1].machine, job.nodes[2].machine)
        outcome = job.outcome()
    print(f"suspicion {suspicion}: longest gap {longest_gap(outcome):.2f} s")
    assert outcome.code == 0, explain(outcome)
    runs.check_exact(outcome)
    lost = {e["worker"] for e in outcome.all("death_detected")}
    assert lost in ({"1.0", "1.1"}, {"2.0", "2.1"}), explain(outcome)
    assert longest_gap(outcome) < suspicion + 2, explain(outcome)


@pytest.mark.parametrize("which", ["of the coordinator's node", pytest.param("of the others", marks=slow)])
def test_resets_for_some_tenths_of_a_second_cost_no_worker(which, zygote, runs, tmp_path):
    case = Case(f"the links {which} reject", "3x2", steps=60, deaths=0)
    with nodes.start(case, tmp_path, zygote) as job:
        job.wait_for_step(10)
        machines = [node.machine for node in job.nodes]
        job.network.reset(*(machines if which == "of the coordinator's node" else machines[1:]), seconds=0.4)
        outcome = job.outcome()
        codes = [node.agent.wait(30) for node in job.nodes]
    print(f"resets {which}: longest gap {longest_gap(outcome):.2f} s")
    assert codes == [0, 0, 0], explain(outcome)
    runs.check_exact(outcome)
    assert not outcome.all("death_detected") and not outcome.all("coordinator_elected"), explain(outcome)
    assert longest_gap(outcome) < 3, explain(outcome)


@slow
def test_loss_delay_and_reordering_cost_no_worker(zygote, runs, tmp_path):
    case = Case("in a storm", "3x2", steps=8, deaths=0)
    with nodes.start(case, tmp_path, zygote) as job:
        job.network.weather(delay=0.05, loss=0.05, reorder=0.1)
        outcome = job.outcome(240)
    assert outcome.code == 0, explain(outcome)
    runs.check_exact(outcome)
    assert not outcome.all("death_detected"), explain(outcome)
