"""Links that fail between nodes that live: cut, rejecting, lossy. Who leaves, how soon, and that no bit changes."""

from itertools import pairwise

import pytest

from . import network, nodes
from .harness import Case, explain

_missing = network.missing()
pytestmark = [pytest.mark.timeout(300), pytest.mark.skipif(_missing is not None, reason=str(_missing))]
slow = pytest.mark.slow


def longest_gap(outcome):
    """Seconds between two commits, at most."""
    return max(after["time"] - before["time"] for before, after in pairwise(outcome.metrics))


@pytest.mark.torchrun
@pytest.mark.parametrize("suspicion", [1, 5, pytest.param(10, marks=slow)])
def test_when_the_link_between_two_nodes_is_cut_one_of_them_leaves_within_suspicion_and_two_seconds(
    suspicion, runs, tmp_path
):
    overrides = (f"control.suspicion={suspicion}",)
    case = Case("the link between two nodes is cut", "3x2", overrides, steps=60, deaths=2)
    with nodes.start(case, tmp_path) as job:
        job.wait_for_step(10)
        job.network.cut(job.nodes[1].machine, job.nodes[2].machine)
        outcome = job.outcome()
    print(f"suspicion {suspicion}: longest gap {longest_gap(outcome):.2f} s")
    assert outcome.code == 0, explain(outcome)
    runs.check_exact(outcome)
    assert {e["worker"] for e in outcome.all("death_detected")} == {"2.0", "2.1"}, explain(outcome)
    assert longest_gap(outcome) < suspicion + 2, explain(outcome)
