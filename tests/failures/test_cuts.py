"""Links between nodes are cut in one or both directions. The nodes that reach each other finish the job.

pytest -n0 -s --full tests/failures/test_cuts.py       # prints the table of docs/cluster.md
"""

from itertools import pairwise

import pytest

from . import network, nodes
from .harness import Case, explain

_missing = network.missing()
pytestmark = [pytest.mark.timeout(300), pytest.mark.skipif(_missing is not None, reason=str(_missing))]

# (from, to) of the links that are cut from step 10 on. Node 0 coordinates, so nodes 1 and 2 are equivalent.
CUTS = {
    "node 0 receives from no other node": [(1, 0), (2, 0)],
    "no other node receives from node 0": [(0, 1), (0, 2)],
    "node 0 is cut off": [(1, 0), (2, 0), (0, 1), (0, 2)],
    "node 1 receives from no other node": [(0, 1), (2, 1)],
    "no other node receives from node 1": [(1, 0), (1, 2)],
    "node 1 is cut off": [(0, 1), (2, 1), (1, 0), (1, 2)],
    "node 1 does not receive from node 0": [(0, 1)],
    "node 0 does not receive from node 1": [(1, 0)],
    "nodes 0 and 1 do not receive from each other": [(0, 1), (1, 0)],
    "node 2 does not receive from node 1": [(1, 2)],
}
QUICK = ("no other node receives from node 0",)


@pytest.mark.parametrize("cut", [cut if cut in QUICK else pytest.param(cut, marks=pytest.mark.slow) for cut in CUTS])
def test_the_nodes_that_reach_each_other_finish_the_job_after_any_cut(cut, zygote, runs, tmp_path):
    case = Case(cut, "3x2", ("control.suspicion=2",), steps=60, deaths=2)
    with nodes.start(case, tmp_path, zygote) as job:
        job.wait_for_step(10)
        machines = [node.machine for node in job.nodes]
        for frm, to in CUTS[cut]:
            job.network.cut(machines[frm], machines[to], one_way=True)
        finished = job.wait_for_event("finished", 60)
        codes = [node.agent.wait(60) for node in job.nodes]
        ended = [(node.agent.output.strip().splitlines() or [""])[-1] for node in job.nodes]
        outcome = job.outcome()
    gap = max(after["time"] - before["time"] for before, after in pairwise(outcome.metrics))
    print(f"\n| {cut} | {' '.join(map(str, codes))} | {gap:.1f} s |")
    for number, (code, line) in enumerate(zip(codes, ended, strict=True)):
        if code:
            print(f"    node {number}: {line[:300]}")
    assert finished and codes.count(0) >= 2, explain(outcome)
    assert [line["step"] for line in outcome.metrics] == list(range(case.steps)), "each step must have one line"
    assert not outcome.all("stopped"), "a node that was given up must not write to the run folder"
    runs.check_exact(outcome)
