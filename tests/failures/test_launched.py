"""Whole nodes die under the launcher that users use: the job goes on, its agents end at once and with 0."""

import json
import random
import signal
import time

import psutil
import pytest

from .launched import COMMON, Launched
from .table import RESULTS

STEPS = 80
NODES = (0, 1, 2)
ARGUMENTS = (f"run.steps={STEPS}", "run.validate_every=0")
EXIT_SECONDS = 150.0  # for the agents once the job is done, on a busy machine: torch's barrier alone would take 300
GAP_SECONDS = 5.0  # between two committed steps, whatever happens
pytestmark = [pytest.mark.timeout(900), pytest.mark.torchrun, pytest.mark.xdist_group("launched")]
slow = pytest.mark.slow
twenty = pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=slow) for n in range(1, 20))])


@pytest.fixture(scope="module")
def expected(zygote):
    """What the job computes when nobody dies; no launcher makes a difference to that."""
    with zygote.run([*COMMON, *ARGUMENTS, *SHAPE]) as job:
        assert job.wait(400) == 0, job.output
        return json.loads(job.run.summary.read_text())["weights_sha256"]


SHAPE = ("parallel.pipelines=3", "parallel.stages=2")


def survives(job, alive, expected):
    """To the end, bit for bit, with all of the agents that are left ending at once and in peace."""
    job.wait_for_event("finished", seconds=400)
    done = time.monotonic()
    job.wait_until(lambda: not job.supervisors(alive), "end of the supervisors", 60)
    supervisors = time.monotonic() - done
    assert job.wait(alive, 60) == [0] * len(alive), job.explain()
    seconds = time.monotonic() - done
    gap = job.longest_gap()
    RESULTS["launched"].append({"deaths": 2 * (3 - len(alive)), "stalls": [gap], "seconds": seconds})
    elections = len(job.events("coordinator_elected"))
    print(
        f"longest gap {gap:.2f} s, {elections} elections, ended after {supervisors:.1f} s, agents after {seconds:.1f} s"
    )
    assert job.committed() == STEPS - 1, job.explain()
    assert json.loads(job.run.summary.read_text())["weights_sha256"] == expected, job.explain()
    assert gap < GAP_SECONDS, job.explain()
    assert seconds < EXIT_SECONDS, job.explain()


def some_moment(job, chance):
    """Anywhere from the start of the workers, which still import what they need, to the last steps."""
    job.wait_for_event("spawned", nth=6)
    if chance.random() < 0.25:
        time.sleep(chance.uniform(0.0, 4.0))
    else:
        job.wait_for_step(chance.randrange(STEPS - 15))
        time.sleep(chance.uniform(0.0, 0.1))


@slow  # the next two lose node 0, too, and then another one
@pytest.mark.parametrize("node", NODES)
@pytest.mark.parametrize("seed", range(20))
def test_a_node_is_lost_at_any_moment(node, seed, expected, tmp_path):
    with Launched(tmp_path, arguments=ARGUMENTS) as job:
        some_moment(job, random.Random(f"{node} {seed}"))
        job.kill(node)
        survives(job, [n for n in NODES if n != node], expected)


@twenty
def test_two_nodes_are_lost_one_after_the_other_and_the_last_one_goes_on(seed, expected, tmp_path):
    """All on one machine: the last one knows for certain that the others are dead."""
    chance = random.Random(f"two {seed}")
    first, second, last = chance.sample(NODES, 3)
    with Launched(tmp_path, arguments=ARGUMENTS) as job:
        job.wait_for_step(chance.randrange(STEPS - 40))
        job.kill(first)
        job.wait_for_event("resumed")
        job.wait_for_step(job.committed() + chance.randrange(10))
        job.kill(second)
        survives(job, [last], expected)


@pytest.mark.parametrize("seed", [pytest.param(n, marks=slow) for n in range(20)])
def test_the_elected_leader_is_lost_in_its_election(seed, expected, tmp_path):
    chance = random.Random(f"election {seed}")
    with Launched(tmp_path, arguments=ARGUMENTS) as job:
        job.wait_for_step(chance.randrange(STEPS - 30))
        job.kill(0)
        time.sleep(chance.choice([0.0, 0.02, 0.1, 0.3, 0.6, 1.0]))
        job.kill(1)
        survives(job, [2], expected)


@slow
def test_the_coordinator_is_lost_while_workers_still_import_what_they_need(expected, tmp_path):
    """They hear from their supervisors where the next one is, though they have never talked to one."""
    with Launched(tmp_path, arguments=ARGUMENTS) as job:
        job.wait_for_event("spawned", nth=6)
        time.sleep(0.5)
        assert not job.events("started"), "it is to be lost before that"
        job.kill(0)
        survives(job, [1, 2], expected)


@slow  # test_coordinator.py has the same in processes that are forked
def test_the_first_node_is_lost_where_the_optimizers_state_is_sharded(expected, tmp_path):
    """The next coordinator knows no table of who holds what: it makes one of what the workers report."""
    with Launched(tmp_path, arguments=(*ARGUMENTS, "parallel.sharded=true")) as job:
        job.wait_for_step(10)
        job.kill(0)
        survives(job, [1, 2], expected)


@pytest.mark.parametrize("node", [0, pytest.param(1, marks=slow)])
def test_an_agent_that_is_stopped_holds_up_no_step_and_ends_with_0_when_it_continues(node, expected, tmp_path):
    with Launched(tmp_path, arguments=ARGUMENTS) as job:
        job.wait_for_step(10)
        agent = psutil.Process(job.agents[node].pid)
        agent.suspend()
        job.wait_for_event("finished", seconds=400)
        assert agent.status() == psutil.STATUS_STOPPED
        assert not job.events("death_detected") and not job.events("coordinator_elected"), job.explain()
        assert job.longest_gap() < GAP_SECONDS, job.explain()
        agent.resume()
        survives(job, NODES, expected)


@slow  # tests/recycle_pp/test_counting.py loses a worker under one agent, test_exactness.py compares the bits
def test_a_worker_dies_under_one_agent_and_comes_back(expected, tmp_path):
    with Launched(tmp_path, 1, 6, [*ARGUMENTS, *SHAPE]) as job:
        job.wait_for_step(10)
        job.worker("1.1").kill()
        survives(job, [0], expected)
        assert [e["cause"] for e in job.events("death_detected")] == ["signal"], job.explain()
        assert [e["worker"] for e in job.events("respawned")] == ["1.1"], job.explain()


@pytest.mark.parametrize(("nodes", "workers"), [pytest.param(3, 2, marks=slow), (1, 4)])
def test_a_run_that_is_complete_ends_every_rank_with_0_under_resume_auto(nodes, workers, tmp_path):
    """A scheduler that requeues starts the same line once more."""
    arguments = ["run.steps=6", "run.validate_every=0", "run.resume=auto"]
    if nodes == 1:
        arguments += ["parallel=2x2"]
    outcomes = []
    for _ in range(2):
        with Launched(tmp_path, nodes, workers, arguments) as job:
            begun = time.monotonic()
            assert job.wait(range(nodes), 200) == [0] * nodes, job.explain()
            files = {path: path.stat().st_mtime_ns for path in job.run.path.rglob("*") if path.is_file()}
            outcomes.append((time.monotonic() - begun, files))
    print(f"ended after {outcomes[1][0]:.1f} s")
    sentence = f"the run is complete: run.dir={job.run.path} has done 6 steps, and run.steps is 6"
    for node in range(nodes):
        assert job.output(node).count(sentence) == 1, job.explain()
        assert "Traceback" not in job.output(node)
    assert outcomes[0][1] == outcomes[1][1], "nothing was written"


def test_no_agent_waits_for_one_that_lost_a_supervisor_in_the_last_moment(tmp_path):
    """That agent fails and does not pass torch's exit barrier. It is stopped here, so it acts only after the end."""
    with Launched(tmp_path, arguments=["run.steps=12"]) as job:
        job.wait_for_step(2)
        _, lost = job.supervisors([2])
        job.agents[2].send_signal(signal.SIGSTOP)
        lost.kill()
        assert job.wait([0, 1], 90) == [0, 0], job.explain()
        job.agents[2].send_signal(signal.SIGCONT)
        assert job.wait([2], 60) == [1], job.explain()
