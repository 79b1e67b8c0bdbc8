"""A worker's main thread hangs while its other threads continue. The job finds and locates the hang, and survives it.

Some tests stop only that thread with ptrace, as if it waited for a kernel that never ends. Others block the thread, or
the whole interpreter, in native code.
"""

import contextlib
import json
import random
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

from recycle_pp.telemetry.follower import Follower

from .freeze import Frozen
from .harness import Case, SignalAt, explain, fails, pid_of

SUSPICION = 1.5
QUICK = ("control.heartbeat=0.1", f"control.suspicion={SUSPICION}")
WHERE = re.compile(r"(the wait for )?(\w+|[a-z -]+?)( of micro-batch \d+\.\d+)?( in step \d+)?( from \d+\.\d+)?(, .*)?")


def test_freezing_stops_one_thread_which_continues_afterwards():
    beat = (
        "threading.Thread(target=lambda: [print('beat', flush=True) or time.sleep(0.05) for _ in range(100)]).start()"
    )
    code = f"import threading, time\n{beat}\nwhile True: print('main', flush=True); time.sleep(0.05)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline()
        time.sleep(0.3)
        with Frozen(process.pid):
            for _ in range(40):
                process.stdout.readline()  # skip buffered output
            assert {process.stdout.readline() for _ in range(10)} == {"beat\n"}
        assert "main\n" in {process.stdout.readline() for _ in range(20)}
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def freezing(worker, steps, after=0.0, held=0.0):
    """Yields a function `freeze(job)`, and a dictionary that it fills with the events, files and times of the hang.

    The function freezes the worker after that many steps plus `after` seconds. By then each kind of op has run once, so
    that `control.suspicion` is the time limit of an op.
    """
    found = {}

    def freeze(job):
        wait_for_step(job, steps)
        time.sleep(after)
        pid = pid_of(worker, job.run.lines(job.run.events))
        with Frozen(pid, held=held) as frozen:
            found["event"] = job.wait_for_event("hang_suspected", 30)
            found["seconds"] = time.monotonic() - frozen.at
            found["report"] = json.loads(report_of(job, found["event"]).read_text())
            job.wait_for_event("resumed", 10)
            found["resumed"] = time.monotonic() - frozen.at
            found["reaped"] = not psutil.pid_exists(pid)
            stacks = job.run.hangs / found["report"][0]["stuck"][worker]["stacks"]
            for _ in range(100):
                if stacks.exists():
                    break
                time.sleep(0.02)
            found["stacks"] = stacks.read_text()

    yield freeze, found


def wait_for_step(job, step):
    metrics = Follower(job.run.metrics)
    while step not in [line["step"] for line in metrics.new()]:
        time.sleep(0.005)


def report_of(job, event):
    return job.run.hangs / f"step-{event['step']:06d}.json"


def main_thread(stacks):
    """The stack trace of the main thread, which runs the executor."""
    return next(part for part in stacks.split("\n\n") if "executor.py" in part and " in run\n" in part)


def check_the_name(where, stacks):
    """Checks that the location in the event agrees with the main thread's stack trace."""
    stood = main_thread(stacks)
    frames = {"the wait for": (" in wait", " in orders"), "sending": (" in ship",), "the turn": (" in _run_step",)}
    expected = next(
        (names for words, names in frames.items() if where.startswith(words)), (" in _compute",) * (where[1:4] == " of")
    )
    assert not expected or any(name in stood for name in expected), (where, stood)


SEEDS = [0, *[pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20)]]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_main_thread_that_stops_anywhere_is_found_located_and_survived(seed, runs):
    rng = random.Random(seed)
    worker, steps, after = rng.choice(["0.0", "0.1", "1.0", "1.1"]), rng.randrange(6, 16), rng.uniform(0.0, 0.06)
    case = Case(f"the main thread stops, seed {seed}", "2x2", (*QUICK, "checkpoint.every=4"), steps=25, bound=120)
    with freezing(worker, steps, after) as (freeze, found):
        outcome = runs.of(case, "one thread stops", meanwhile=freeze)
    runs.check_exact(outcome)
    assert found["event"]["worker"] == worker, explain(outcome)
    # It may take less than the suspicion, because the op began before the freeze.
    assert SUSPICION - 0.2 < found["seconds"] < SUSPICION + 2, explain(outcome)
    where = found["event"]["where"]
    assert WHERE.fullmatch(where), where
    check_the_name(where, found["stacks"])
    assert outcome.stalls[0] > found["event"]["seconds"] > SUSPICION, "the stall must be counted from the last progress"
    assert outcome.all("death_detected")[0]["cause"] == "hang"
    assert set(found["report"][0]["workers"]) == {"0.0", "0.1", "1.0", "1.1"}


@pytest.mark.slow
def test_a_killed_worker_that_cannot_be_reaped_does_not_delay_the_recovery(runs):
    """For example because the kernel is still freeing its memory. Here a tracer delays the reaping."""
    case = Case("it cannot be reaped for 4 s", "2x2", QUICK, steps=30, bound=120)
    with freezing("0.1", 8, held=4.0) as (freeze, found):
        outcome = runs.of(case, "one thread stops", meanwhile=freeze)
    runs.check_exact(outcome)
    assert not found["reaped"] and found["resumed"] < SUSPICION + 2.5, explain(outcome)


INSIDE = [
    pytest.param("sleep", "F of micro-batch 1.1 in step 5", 1, marks=pytest.mark.slow),
    pytest.param("lock", "F of micro-batch 1.1 in step 5", 1, marks=pytest.mark.slow),
    pytest.param("spin", "F of micro-batch 1.1 in step 5", 10, marks=pytest.mark.slow),
    ("read", "reading the data of micro-batch 1.1 in step 5", 1),
]


@pytest.mark.parametrize(("kind", "where", "times"), INSIDE)
def test_a_hanging_op_is_found_with_and_without_the_interpreters_lock(kind, where, times, sabotaged, tmp_path):
    plan = {"hang": kind, "stage": 1, "step": 5, "g": 5, "once": str(tmp_path / "hung")}
    case = Case(f"hangs in its forward ({kind})", "2x2", QUICK)
    outcome = sabotaged.of(case, "one thread stops", environment={"RECYCLE_SABOTAGE": json.dumps(plan)})
    sabotaged.check_exact(outcome)
    (found,) = outcome.all("hang_suspected")
    assert found["where"] == where, explain(outcome)
    assert times * SUSPICION < found["seconds"] < times * SUSPICION + 2


@pytest.mark.slow  # quick counterpart: the busy workers in tests/recycle_pp/protocol/test_hangs.py
def test_an_op_that_computes_five_hundred_times_as_long_is_not_a_hang(sabotaged, tmp_path):
    """The op takes longer than the suspicion and ten times its profiled time, but its thread is running or runnable."""
    seconds = SUSPICION + 0.5
    plan = {"hang": "burn", "seconds": seconds, "stage": 1, "step": 5, "g": 5, "once": str(tmp_path / "slow")}
    case = Case("an op takes very long", "2x2", QUICK, steps=12, deaths=0)
    outcome = sabotaged.of(case, "false alarms", environment={"RECYCLE_SABOTAGE": json.dumps(plan)})
    sabotaged.check_exact(outcome)
    assert max(line["step_seconds"] for line in outcome.metrics) > seconds
    assert not outcome.all("hang_suspected") and not outcome.all("renewed"), explain(outcome)


@pytest.mark.slow
def test_a_main_thread_that_hangs_in_a_checkpoint_is_found(sabotaged, tmp_path):
    plan = {"hang": "copy", "step": 6, "once": str(tmp_path / "hung")}
    case = Case("hangs while it copies its state", "2x2", (*QUICK, "checkpoint.every=6"), steps=12)
    outcome = sabotaged.of(case, "one thread stops", environment={"RECYCLE_SABOTAGE": json.dumps(plan)})
    sabotaged.check_exact(outcome)
    assert outcome.all("hang_suspected")[0]["where"] == "copying the state for a checkpoint in step 5"


@pytest.mark.slow  # quick counterpart: the renewed generation in tests/recycle_pp/coordinator/test_hang_detector.py
def test_a_hanging_all_reduce_costs_a_generation_and_no_worker(sabotaged, tmp_path):
    plan = {"hang": "reduce", "step": 5, "once": str(tmp_path / "hung")}
    case = Case("an all-reduce hangs", "2x2", QUICK, steps=12, deaths=0)
    outcome = sabotaged.of(case, "one thread stops", environment={"RECYCLE_SABOTAGE": json.dumps(plan)})
    sabotaged.check_exact(outcome)
    (renewed,) = outcome.all("renewed")
    assert renewed["step"] == 5 and not outcome.all("hang_suspected"), explain(outcome)


@pytest.mark.slow
def test_a_slow_disk_costs_a_checkpoint_and_no_step(sabotaged, tmp_path):
    plan = {"hang": "save", "seconds": 4, "once": str(tmp_path / "hung")}
    case = Case("a checkpoint takes 4 s", "2x2", ("checkpoint.every=2",), steps=12, deaths=0)
    outcome = sabotaged.of(case, "one thread stops", environment={"RECYCLE_SABOTAGE": json.dumps(plan)})
    sabotaged.check_exact(outcome)
    (first, *_), saved = outcome.all("checkpoint_skipped"), outcome.all("checkpoint_saved")
    assert first["checkpoint"] == 4 and first["by"].startswith("worker"), explain(outcome)
    assert saved[-1]["checkpoint"] == 12
    longest = max(line["step_seconds"] for line in outcome.metrics[1:])
    assert longest < 2, "a step waited for the disk"


@pytest.mark.slow
def test_after_the_death_of_a_saver_the_next_checkpoint_waits_for_workers_that_still_write(sabotaged):
    """Otherwise their late parts would make that checkpoint fail, its late parts the next one, and so on."""
    faults = fails("15:0.1@forward")
    case = Case("a saver dies, and all disks are slow", "2x2", (*faults, "checkpoint.every=2"), steps=100)
    plan = {"hang": "save", "seconds": 0.8}
    outcome = sabotaged.of(case, "one thread stops", environment={"RECYCLE_SABOTAGE": json.dumps(plan)})
    sabotaged.check_exact(outcome)
    saved = [e["checkpoint"] for e in outcome.all("checkpoint_saved")]
    assert [step for step in saved if 16 <= step < 100] and not outcome.all("checkpoint_failed"), explain(outcome)


@pytest.mark.slow
def test_a_file_system_that_never_answers_does_not_delay_the_end_of_the_job(sabotaged, tmp_path):
    plan = {"hang": "save", "once": str(tmp_path / "hung")}
    case = Case("a checkpoint never ends", "2x2", ("checkpoint.every=4", "control.lease=15"), steps=12, deaths=0,
                ends="checkpoint step-000012 was not saved: worker")  # fmt: skip
    outcome = sabotaged.of(case, "one thread stops", environment={"RECYCLE_SABOTAGE": json.dumps(plan)})
    assert outcome.code == 1 and [e["checkpoint"] for e in outcome.all("checkpoint_skipped")] == [8]
    assert outcome.summary["steps"] == 12, "all steps must be trained"


@pytest.mark.slow  # quick counterpart: tests/recycle_pp/supervisor/test_event_loop_watchdog.py
@pytest.mark.parametrize("rank", [2, 0])
def test_a_supervisor_with_a_blocked_loop_exits_and_the_others_continue(rank, runs):
    """Even if the supervisor hosts the coordinator. All ranks are on one node with one launcher."""

    def freeze(job):
        wait_for_step(job, 6)
        with Frozen(job.supervisors()[rank], idle=True):
            job.wait(280)

    case = Case(f"the loop of rank {rank}'s supervisor is blocked", "2x2", QUICK, steps=150, bound=300)
    outcome = runs.of(case, "one thread stops", meanwhile=freeze)
    runs.check_exact(outcome)
    assert f"rank {rank} exits: its event loop has been blocked" in outcome.output
    assert [e["worker"] for e in outcome.all("death_detected")] == [f"{rank // 2}.{rank % 2}"], explain(outcome)
    assert len(outcome.all("coordinator_elected")) == (rank == 0)


@pytest.mark.slow
def test_a_stopped_supervisor_is_given_up_and_its_worker_returns_when_it_continues(runs):
    stopped = SignalAt("started", "1.1", number=signal.SIGSTOP, resume=4.0, above=True)
    case = Case("a supervisor is stopped for 4 s", "2x2", QUICK, (stopped,), steps=250, bound=300)
    outcome = runs.of(case, "one thread stops")
    runs.check_exact(outcome)
    assert outcome.all("death_detected")[0]["cause"] == "node_loss"
    assert outcome.all("supervisor_back"), explain(outcome)
