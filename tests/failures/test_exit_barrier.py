"""If a node is cut off, torchrun's agents end with the job instead of waiting minutes in torch's exit barrier."""

import re
import signal

import pytest

from . import network, nodes
from .harness import Case, explain
from .launched import Launched

_missing = network.missing()
pytestmark = [pytest.mark.timeout(300), pytest.mark.torchrun]
WAITED = re.compile(r"(?:Done|Error) waiting (?:for other agents|on exit barrier)\. Elapsed: ([0-9.]+) seconds")


@pytest.mark.skipif(_missing is not None, reason=str(_missing))
@pytest.mark.parametrize("lost", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_after_a_cut_the_agents_end_within_ten_seconds_of_their_supervisors(lost, runs, tmp_path):
    """Node 0 hosts the agents' store. The cut drops packets and does not reject them."""
    case = Case(f"node {lost} is cut off", "3x1", ("control.suspicion=2", "run.standby=off"), steps=20, deaths=1)
    others = [number for number in range(3) if number != lost]
    with nodes.start(case, tmp_path) as job:
        job.wait_for_step(3)
        job.network.cut(job.nodes[lost].machine)
        codes = [job.nodes[number].agent.end(90) for number in (*others, lost)]
        outcome = job.outcome(node=others[0])
        waited = [float(WAITED.findall(job.nodes[number].agent.output)[-1]) for number in others]
    print(f"node {lost} cut off: the agents waited {waited} s")
    assert codes == [0, 0, 1], explain(outcome)
    assert max(waited) < 10, explain(outcome)
    runs.check_exact(outcome)


@pytest.mark.slow
def test_agents_wait_only_for_a_suspended_supervisor_of_their_own_node(tmp_path):
    with Launched(tmp_path, arguments=["run.steps=30", "control.suspicion=2", "run.standby=off"]) as job:
        job.wait_for_step(2)
        job.kill(2)
        suspended = job.supervisors([0])[1]  # the supervisor of rank 1, for which agent 0 waits
        suspended.send_signal(signal.SIGSTOP)
        assert job.wait([1], 60) == [0], job.explain()
        assert job.agents[0].poll() is None
        suspended.send_signal(signal.SIGCONT)
        assert job.wait([0], 30) == [0], job.explain()
        assert job.events()[-1]["event"] == "finished"
