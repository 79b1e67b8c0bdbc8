"""Whole nodes die under the real launcher. The job continues, and at its end all agents end at once with 0."""

import json
import random
import signal
import time

import psutil
import pytest

from recycle_pp.telemetry.heartbeat import SECONDS, Sign, address_of, refuse_running

from .launched import COMMON, Launched
from .table import RESULTS

STEPS = 80
NODES = (0, 1, 2)
ARGUMENTS = (f"run.steps={STEPS}", "run.validate_every=0")
# maximum time from the end of the job to the end of the agents; torch's exit barrier would take 300 s
EXIT_SECONDS = 150.0
GAP_SECONDS = 5.0  # maximum time between two commits
pytestmark = [pytest.mark.timeout(900), pytest.mark.torchrun]
slow = pytest.mark.slow
twenty = pytest.mark.parametrize("seed", range(20))


@pytest.fixture(scope="module")
def expected(zygote):
    """The digest of the weights of a fault-free job, which does not depend on the launcher."""
    with zygote.run([*COMMON, *ARGUMENTS, *SHAPE]) as job:
        assert job.wait(400) == 0, job.output
        return json.loads(job.run.summary.read_text())["weights_sha256"]


SHAPE = ("parallel.pipelines=3", "parallel.stages=2")


def survives(job, alive, expected):
    """Checks that the job ends with the expected weights, and that all remaining agents then end at once with 0."""
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
    """Waits for a random moment between the start of the workers, while they still import, and the last steps."""
    job.wait_for_event("spawned", nth=6)
    if chance.random() < 0.25:
        time.sleep(chance.uniform(0.0, 4.0))
    else:
        job.wait_for_step(chance.randrange(STEPS - 15))
        time.sleep(chance.uniform(0.0, 0.1))


@slow  # quick counterparts: test_nodes.py and test_nodes_coordinator.py, without torchrun
@pytest.mark.parametrize("node", NODES)
@pytest.mark.parametrize("seed", range(20))
def test_a_node_may_be_lost_at_any_moment(node, seed, expected, tmp_path):
    with Launched(tmp_path, arguments=ARGUMENTS) as job:
        some_moment(job, random.Random(f"{node} {seed}"))
        job.kill(node)
        survives(job, [n for n in NODES if n != node], expected)


@slow  # quick counterpart: test_exit_barrier.py cuts a node off
@twenty
def test_two_nodes_are_lost_one_after_the_other_and_the_last_one_continues(seed, expected, tmp_path):
    """All nodes are on one machine, so the last one can prove that the others are dead."""
    chance = random.Random(f"two {seed}")
    first, second, last = chance.sample(NODES, 3)
    with Launched(tmp_path, arguments=ARGUMENTS) as job:
        job.wait_for_step(chance.randrange(STEPS - 40))
        job.kill(first)
        job.wait_for_event("resumed")
        job.wait_for_step(job.committed() + chance.randrange(10))
        job.kill(second)
        survives(job, [last], expected)


@slow
@twenty
def test_the_elected_leader_may_be_lost_during_its_election(seed, expected, tmp_path):
    chance = random.Random(f"election {seed}")
    with Launched(tmp_path, arguments=ARGUMENTS) as job:
        job.wait_for_step(chance.randrange(STEPS - 30))
        job.kill(0)
        time.sleep(chance.choice([0.0, 0.02, 0.1, 0.3, 0.6, 1.0]))
        job.kill(1)
        survives(job, [2], expected)


@slow
def test_the_coordinator_may_be_lost_while_workers_are_importing(expected, tmp_path):
    """Workers that have not connected yet receive the next coordinator's address from their supervisors."""
    with Launched(tmp_path, arguments=ARGUMENTS) as job:
        job.wait_for_event("spawned", nth=6)
        time.sleep(0.5)
        assert not job.events("started"), "the coordinator must be lost before workers have started"
        job.kill(0)
        survives(job, [1, 2], expected)


def test_a_take_over_does_not_look_like_the_end_of_the_job(tmp_path):
    with Launched(tmp_path, arguments=("run.steps=100000", "run.validate_every=0", "emulate=sleep")) as job:
        job.wait_for_step(3)
        time.sleep(2 * SECONDS)  # two writes of heartbeat.json
        job.supervisors([0])[0].kill()
        with pytest.raises(ValueError, match="belongs to a job that still runs"):
            refuse_running(job.run)
        job.wait_for_event("resumed")
        assert address_of(job.run) == Sign.read(job.run).address
        job.wait_until(lambda: locked(job.run), "the lock of the next coordinator", 10)


def locked(run) -> bool:
    try:
        run.lock()
    except ValueError:
        return True
    run.unlock()
    return False


@slow  # quick counterpart: the same case with forked processes in test_coordinator.py
def test_the_first_node_may_be_lost_with_sharded_optimizer_state(expected, tmp_path):
    """The next coordinator does not know which worker holds which unit, and learns it from the workers' reports."""
    with Launched(tmp_path, arguments=(*ARGUMENTS, "parallel.sharded=true")) as job:
        job.wait_for_step(10)
        job.kill(0)
        survives(job, [1, 2], expected)


@slow
@pytest.mark.parametrize("node", [0, 1])
def test_a_stopped_agent_delays_no_step_and_ends_with_0_when_it_continues(node, expected, tmp_path):
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


@slow  # quick counterparts: tests/recycle_pp/test_counting.py (one agent), test_exactness.py (bits)
def test_a_worker_dies_under_one_agent_and_returns(expected, tmp_path):
    with Launched(tmp_path, 1, 6, [*ARGUMENTS, *SHAPE]) as job:
        job.wait_for_step(10)
        job.worker("1.1").kill()
        survives(job, [0], expected)
        assert [e["cause"] for e in job.events("death_detected")] == ["signal"], job.explain()
        assert [e["worker"] for e in job.events("respawned")] == ["1.1"], job.explain()


@slow  # quick counterpart: tests/recycle_pp/test_counting.py resumes a job with a real launcher
@pytest.mark.parametrize(("nodes", "workers"), [(3, 2), (1, 4)])
def test_with_resume_auto_every_rank_of_a_complete_run_exits_with_0(nodes, workers, tmp_path):
    """A scheduler may requeue a job with the same command line."""
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
    sentence = f"the run is complete: run.dir={job.run.path} has completed 6 steps, and run.steps=6"
    for node in range(nodes):
        assert job.output(node).count(sentence) == 1, job.explain()
        assert "Traceback" not in job.output(node)
    assert outcomes[0][1] == outcomes[1][1], "no file may change"


@slow
def test_no_agent_waits_for_an_agent_that_lost_a_supervisor_at_the_end(tmp_path):
    """The agent that lost a supervisor fails without passing torch's exit barrier. Here it is stopped until the job has
    ended."""
    with Launched(tmp_path, arguments=["run.steps=12"]) as job:
        job.wait_for_step(2)
        _, lost = job.supervisors([2])
        job.agents[2].send_signal(signal.SIGSTOP)
        lost.kill()
        assert job.wait([0, 1], 90) == [0, 0], job.explain()
        job.agents[2].send_signal(signal.SIGCONT)
        assert job.wait([2], 60) == [1], job.explain()


@slow
@pytest.mark.parametrize("seed", range(10))
def test_the_last_worker_of_a_stage_dies_and_its_understudy_takes_over_without_a_checkpoint(seed, expected, tmp_path):
    chance = random.Random(seed)
    with Launched(tmp_path, arguments=[*ARGUMENTS, "state.understudy=auto", "run.respawns=0"]) as job:
        job.wait_for_step(3)
        *others, last = chance.sample(["0.1", "1.1", "2.1"], 3)
        for name in others:
            job.worker(name).kill()
        job.wait_for_event("understudy_in_step")
        time.sleep(chance.uniform(0.0, 4.0))
        job.worker(last).kill()
        survives(job, NODES, expected)
        assert [event["worker"] for event in job.events("took_over")] == [last]
        assert not job.events("restored") and not job.events("stage_lost")
