"""The clock of one node jumps by an hour, and the job continues. No decision depends on a difference between clocks."""

import json
from pathlib import Path

import pytest

from recycle_pp.testing.local_cluster import Zygote

from . import network, nodes
from .harness import Case, explain

_missing = network.missing()
pytestmark = [pytest.mark.timeout(300), pytest.mark.skipif(_missing is not None, reason=str(_missing))]
HOUR = 3600


@pytest.fixture(scope="module")
def clocks():
    with Zygote(preload=Path(__file__).with_name("sabotage.py")) as zygote:
        yield zygote


@pytest.mark.slow
@pytest.mark.parametrize("hours", [-1, 1])
def test_a_node_joins_by_the_run_folder_even_if_the_coordinators_clock_jumps_by_an_hour(hours, clocks, runs, tmp_path):
    jump = {"RECYCLE_SABOTAGE": json.dumps({"jump": hours * HOUR, "when": str(tmp_path / "now")})}
    case = Case("the coordinator's clock jumps", "3x2", steps=80, deaths=2)
    with nodes.start(case, tmp_path, clocks, environments={0: jump}) as job:
        job.wait_for_step(5)
        (tmp_path / "now").touch()
        job.wait_for_step(10)
        job.nodes[2].machine.kill()
        job.wait_for_event("plan_adopted", nth=2)
        newcomer = job.join(where=str(job.run.path))
        job.wait_for_event("rejoined", nth=2)
        outcome = job.outcome()
        assert newcomer.agent.wait(30) == 0, job.output
    assert outcome.code == 0, explain(outcome)
    runs.check_exact(outcome)
    times = [line["time"] for line in outcome.metrics]
    assert abs(times[-1] - times[0] - hours * HOUR) < 300, "the clock has not jumped"


@pytest.mark.slow
def test_the_next_coordinator_continues_even_if_its_clock_is_an_hour_behind(clocks, runs, tmp_path):
    (tmp_path / "now").touch()
    jump = {"RECYCLE_SABOTAGE": json.dumps({"jump": -HOUR, "when": str(tmp_path / "now")})}
    case = Case("the next coordinator's clock is behind", "3x2", steps=40, deaths=2)
    with nodes.start(case, tmp_path, clocks, environments={1: jump}) as job:
        job.wait_for_step(10)
        job.nodes[0].machine.kill()
        outcome = job.outcome(node=1)
    assert outcome.code == 0, explain(outcome)
    runs.check_exact(outcome)
    assert outcome.all("coordinator_elected"), explain(outcome)
    assert all(stall >= 0 for stall in outcome.stalls), explain(outcome)
