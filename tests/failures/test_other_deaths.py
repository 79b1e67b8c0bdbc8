"""Deaths by causes other than SIGKILL, and disturbances that must not cost a worker."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from .harness import Case, SignalAt, explain, fails, rejoins

slow = pytest.mark.slow
PATIENT = ("control.heartbeat=0.1", "control.suspicion=3")
NERVOUS = ("control.heartbeat=0.1", "control.suspicion=1")


PAUSED = SignalAt("started", "1.1", number=signal.SIGSTOP, resume=0.7)
SEGMENTATION_FAULT = SignalAt("started", "0.1", after=0.3, number=signal.SIGSEGV)
ABORT = SignalAt("started", "1.0", after=0.3, number=signal.SIGABRT)

SURVIVED = [
    Case("hangs and returns", "2x2", ("+hang_at=2:1.0@send", *rejoins("5:1.0"), *NERVOUS), stagger=True),
    Case("is paused briefly", "2x2", PATIENT, (PAUSED,), deaths=0),
    Case("crashes and is restarted", "2x2", (), (SEGMENTATION_FAULT,), steps=25),
    Case("aborts in native code", "2x2", (), (ABORT,), steps=25),
]


@slow  # quick counterparts: test_hangs.py, test_connections.py (restarts)
@pytest.mark.parametrize("case", SURVIVED, ids=str)
def test_faults_of_a_worker_change_no_bit(case, runs):
    runs.check_exact(runs.of(case, "not SIGKILL"))


@slow  # quick counterpart: test_hangs.py
def test_a_hung_worker_is_found_within_the_suspicion_and_reported_as_a_hang(runs):
    case = Case("hangs", "2x2", ("+hang_at=3:0.1", *NERVOUS))
    outcome = runs.of(case, "not SIGKILL")
    runs.check_exact(outcome)
    (found,), (death,) = outcome.all("hang_suspected"), outcome.all("death_detected")
    assert found["where"].startswith("F of micro-batch") and "step 3" in found["where"], explain(outcome)
    assert death["cause"] == "hang" and found["where"] in death["detail"]
    assert 1 < found["seconds"] < outcome.stalls[0] < 3, "the stall must be counted from the last progress"


@slow
def test_a_worker_that_wakes_after_it_was_given_up_changes_no_bit(runs):
    """The supervisor is paused as well, as on a paused machine, so it cannot kill the worker until both wake."""
    paused = [SignalAt("started", "0.1", number=signal.SIGSTOP, resume=2.5, supervisor=True)]
    case = Case("wakes after it was given up", "2x2", NERVOUS, tuple(paused), steps=120, bound=90)
    runs.check_exact(runs.of(case, "not SIGKILL"))


@slow
def test_a_slow_worker_gets_a_smaller_share(runs):
    outcome = runs.of(Case("is slow", "2x2", ("+slow_at=5:0.1@5",), steps=20, deaths=0), "not SIGKILL")
    runs.check_exact(outcome)
    assert "0.1" in [e["worker"] for e in outcome.all("slow")], explain(outcome)
    last = outcome.traces[max(outcome.traces)]
    forwards = [sum(op.kind == "F" and op.worker == (d, 1) for op in last.ops) for d in (0, 1)]
    assert forwards[0] < forwards[1]


def test_a_host_that_slows_down_as_a_whole_is_found_by_comparison_with_its_own_first_steps(zygote, tmp_path):
    """Three of four workers become slow, so the median of their peers is slow, too. They are found after 15 steps, or
    later on a busy machine, because steps in which a worker waits for a core do not count."""
    hot = {"0.0", "0.1", "1.0"}
    sizes = ["parallel=2x2", "parallel.microbatches=2", "emulate=sleep", *(f"emulate.{kind}=0.003" for kind in "FIWO")]
    faults = f"+slow_at=[{','.join(f'110:{worker}@2.5' for worker in sorted(hot))}]"
    with zygote.run([*sizes, "model=tiny", "run.steps=200", faults, f"run.dir={tmp_path / 'run'}"]) as job:
        assert job.wait(120) == 0, job.output
        found = [event for event in job.run.lines(job.run.events) if event["event"] == "slow"]
        assert {event["worker"] for event in found} == hot
        # On a busy machine one of them may be found first, and then be slower than the peers that are not found yet.
        assert [event["against"] for event in found].count("itself") >= 2, found
        assert all(event["step"] >= 124 and 1.8 < event["factor"] < 3 for event in found), found
        assert "1.0 times" not in job.output and "times as long as in its own first steps" in job.output


@pytest.mark.parametrize("stagger", [pytest.param(False, marks=slow), True])
def test_an_evicted_worker_hands_its_work_over_before_it_leaves(stagger, runs):
    told = SignalAt("started", "0.1", after=0.3, number=signal.SIGTERM)
    case = Case("is evicted", "2x2", (), (told,), steps=25, stagger=stagger)
    outcome = runs.of(case, "evictions")
    runs.check_exact(outcome)
    assert [e["worker"] for e in outcome.all("left")] == ["0.1"], explain(outcome)
    assert outcome.all("death_detected")[0]["cause"] == "eviction"
    assert sum(e["lost_ops"] for e in outcome.all("plan_adopted")) == 0 or stagger
    assert not outcome.all("respawned")


@slow
@pytest.mark.parametrize("worker", ["1.1", "0.0"])  # 0.0's supervisor hosts the coordinator
def test_sigterm_to_one_supervisor_evicts_its_rank_and_the_job_continues(worker, runs):
    """As when each rank runs in a container, and the cloud sends a notice before it takes a machine."""
    told = SignalAt("started", worker, after=0.3, number=signal.SIGTERM, above=True)
    case = Case(f"{worker}'s container is evicted", "2x2", (), (told,), steps=60)
    outcome = runs.of(case, "evictions")
    runs.check_exact(outcome)
    assert [e["worker"] for e in outcome.all("left")] == [worker], explain(outcome)


@slow
def test_a_worker_killed_right_after_its_eviction_notice_counts_as_dead(runs):
    term, kill = (
        SignalAt("started", "0.1", after=after, number=number)
        for after, number in ((0.3, signal.SIGTERM), (0.1, signal.SIGKILL))
    )
    case = Case("is evicted and killed 100 ms later", "2x2", (), (term, kill), steps=25)
    runs.check_exact(runs.of(case, "evictions"))


@slow
def test_the_last_worker_of_a_stage_stays_as_long_as_possible(runs):
    told = [
        SignalAt("started", "0.1", after=0.3, number=signal.SIGTERM),
        SignalAt("left", "1.1", number=signal.SIGTERM),
    ]
    case = Case("all workers of a stage are evicted", "2x2", (), tuple(told), steps=25)
    outcome = runs.of(case, "evictions")
    runs.check_exact(outcome)
    assert [e["worker"] for e in outcome.all("evicted")] == ["0.1", "1.1"]


@slow
@pytest.mark.parametrize("steps", [120, pytest.param(4000, marks=pytest.mark.timeout(3000))])
def test_with_every_core_busy_no_worker_is_given_up(steps, runs):
    """Other processes keep every core busy during the whole job. The longer run takes ten minutes on two cores."""
    bound = 60 + 0.5 * steps

    def burn(job):
        job.wait_for_event("started", 60)
        loop = f"import time; end = time.monotonic() + {bound}\nwhile time.monotonic() < end: pass"
        hogs = [subprocess.Popen([sys.executable, "-c", loop]) for _ in range(2 * os.cpu_count())]
        try:
            job.wait(bound)
        finally:
            for hog in hogs:
                hog.kill()
                hog.wait()

    case = Case("every core is busy", "2x2", PATIENT, steps=steps, deaths=0, bound=bound)
    runs.check_exact(runs.of(case, "false alarms", meanwhile=burn))


@slow
def test_a_paused_machine_costs_no_worker(runs):
    """As on a closed laptop, all processes stop for longer than the suspicion, then continue."""

    def pause(job):
        job.wait_for_event("started", 60)
        processes = [*job.supervisors(), *job.workers().values()]
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in processes:
                os.kill(pid, number)
            time.sleep(2.5)

    case = Case("the machine is paused", "2x2", NERVOUS, steps=60, deaths=0)
    outcome = runs.of(case, "false alarms", meanwhile=pause)
    runs.check_exact(outcome)
    assert not outcome.all("hang_suspected")


@slow
def test_a_long_compile_is_not_a_hang(sabotaged):
    case = Case("compiles for a long time", "2x2", NERVOUS, deaths=0)
    compile = {"RECYCLE_SABOTAGE": json.dumps({"compile": 2.5})}
    outcome = sabotaged.of(case, "false alarms", environment=compile)
    sabotaged.check_exact(outcome)
    assert outcome.seconds > 2.5


@slow  # quick counterpart: test_hangs.py
def test_a_worker_that_is_suspended_while_it_starts_is_replaced_after_the_suspicion(sabotaged, tmp_path):
    """Otherwise the job would miss a worker for `control.lease` seconds."""
    case = Case("is suspended while it starts", "2x2", NERVOUS, (SEGMENTATION_FAULT,), steps=100, deaths=2, bound=60)
    plan = {"suspended": str(tmp_path / "started"), "after": 4}
    outcome = sabotaged.of(case, "not SIGKILL", environment={"RECYCLE_SABOTAGE": json.dumps(plan)})
    sabotaged.check_exact(outcome)
    (found,) = outcome.all("hang_suspected")
    assert found["seconds"] < 3 and len(outcome.all("rejoined")) == 1, explain(outcome)


@slow
def test_a_clock_that_jumps_makes_no_difference(sabotaged):
    case = Case("the clock jumps", "2x2", (*fails("3:0.1@backward"), *NERVOUS))
    outcome = sabotaged.of(case, "false alarms", environment={"RECYCLE_SABOTAGE": json.dumps({"clock": 3600})})
    sabotaged.check_exact(outcome)
    times = [event["time"] for event in outcome.events]
    assert max(times) - min(times) > 3000, "the clock has not jumped"
    assert max(outcome.stalls) < 60


@pytest.mark.parametrize("error", [pytest.param("ValueError", marks=slow), "OutOfMemoryError"])
def test_an_exception_that_does_not_repeat_costs_one_worker_until_it_is_restarted(error, sabotaged, tmp_path):
    plan = {"raise": error, "stage": 1, "step": 3, "g": 5, "once": str(tmp_path / "raised")}
    case = Case(f"raises {error} once", "2x2", steps=25)
    outcome = sabotaged.of(case, "not SIGKILL", environment={"RECYCLE_SABOTAGE": json.dumps(plan)})
    sabotaged.check_exact(outcome)
    (death,) = outcome.all("death_detected")
    assert death["cause"] == {"ValueError": "exception", "OutOfMemoryError": "out_of_memory"}[error]
    assert "sabotaged" in death["detail"]
    assert outcome.all("respawned")


@slow
def test_an_op_that_fails_on_two_workers_stops_the_job_with_its_traceback(sabotaged):
    plan = {"raise": "ValueError", "stage": 1, "step": 3, "g": 5}
    case = Case("raises on every peer", "3x2", ends="both failed in F of micro-batch 1.2 in step 3", deaths=None)
    outcome = sabotaged.of(case, "not SIGKILL", environment={"RECYCLE_SABOTAGE": json.dumps(plan)})
    assert outcome.deaths in (2, 3), "3 if the third worker starts the op before the report of the first arrives"
    assert "ValueError: sabotaged" in outcome.output
    names = [event["event"] for event in outcome.events]
    assert "respawned" not in names[names.index("stopped") :], "no worker may be restarted in a stopped job"


def test_workers_with_different_gpus_are_rejected_in_one_sentence(sabotaged, tmp_path):
    case = Case("has another GPU", "2x2", ends="has another GPU, not cpu", deaths=0)
    plan = {"foreign": str(tmp_path / "started"), "after": 3}
    outcome = sabotaged.of(case, "not SIGKILL", environment={"RECYCLE_SABOTAGE": json.dumps(plan)})
    assert outcome.code == 2 and "all workers need the same platform" in outcome.output


@slow
def test_a_returning_worker_with_another_gpu_is_rejected_and_the_job_continues(sabotaged, tmp_path):
    case = Case("returns on another GPU", "2x2", ("+fail_at=3:0.1", "+rejoin_at=5:0.1"), steps=40, deaths=2)
    plan = {"foreign": str(tmp_path / "started"), "after": 4}
    outcome = sabotaged.of(case, "not SIGKILL", environment={"RECYCLE_SABOTAGE": json.dumps(plan)})
    sabotaged.check_exact(outcome)
    assert [e["platform"] for e in outcome.all("refused")] == ["another GPU"] and not outcome.all("rejoined")
