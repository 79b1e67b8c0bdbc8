"""A worker whose main thread stands still while all its other threads go on: found, named, survived.

A hang from outside stops that one thread, by ptrace, as a kernel that never ends would; one from inside blocks it, or
the whole interpreter, in machine code.
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
from .harness import Case, Strike, explain, fails, pid_of

SUSPICION = 1.5
QUICK = ("control.heartbeat=0.1", f"control.suspicion={SUSPICION}")
WHERE = re.compile(r"(the wait for )?(\w+|[a-z -]+?)( of micro-batch \d+\.\d+)?( in step \d+)?( from \d+\.\d+)?(, .*)?")


def test_a_frozen_thread_is_one_thread_and_goes_on_afterwards():
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
                process.stdout.readline()  # what was on its way
            assert {process.stdout.readline() for _ in range(10)} == {"beat\n"}
        assert "main\n" in {process.stdout.readline() for _ in range(20)}
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def freezing(worker, steps, after=0.0, held=0.0):
    """(what to do meanwhile, where the time until it was found will be). It strikes `after` so many steps and seconds:
    each op has run before, so that its limit is the suspicion, no lease."""
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
    """The part of it in the stacks of all threads: the one that runs the executor."""
    return next(part for part in stacks.split("\n\n") if "executor.py" in part and " in run\n" in part)


def check_the_name(where, stacks):
    """The place that the event names is where the main thread stood, by its own stack."""
    stood = main_thread(stacks)
    frames = {"the wait for": (" in wait", " in orders"), "sending": (" in ship",), "the turn": (" in _run_step",)}
    expected = next(
        (names for words, names in frames.items() if where.startswith(words)), (" in _compute",) * (where[1:4] == " of")
    )
    assert not expected or any(name in stood for name in expected), (where, stood)


SEEDS = [0, *[pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20)]]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_main_thread_that_stops_anywhere_is_found_named_and_survived(seed, runs):
    rng = random.Random(seed)
    worker, steps, after = rng.choice(["0.0", "0.1", "1.0", "1.1"]), rng.randrange(6, 16), rng.uniform(0.0, 0.06)
    case = Case(f"its main thread stops, seed {seed}", "2x2", (*QUICK, "checkpoint.every=4"), steps=30, bound=120)
    with freezing(worker, steps, after) as (freeze, found):
        outcome = runs.of(case, "one thread stops", meanwhile=freeze)
    runs.check_exact(outcome)
    assert found["event"]["worker"] == worker, explain(outcome)
    assert SUSPICION < found["seconds"] < SUSPICION + 2, explain(outcome)
    where = found["event"]["where"]
    assert WHERE.fullmatch(where), where
    check_the_name(where, found["stacks"])
    assert outcome.stalls[0] > found["event"]["seconds"] > SUSPICION, "the stall counts from the last progress"
    assert outcome.all("death_detected")[0]["cause"] == "hang"
    assert set(found["report"][0]["workers"]) == {"0.0", "0.1", "1.0", "1.1"}


def test_a_killed_worker_that_cannot_be_reaped_holds_nobody_up(runs):
    """As one whose memory, or whose file system, the kernel still has to clean up: here a tracer keeps it."""
    case = Case("it cannot be reaped for 4 s", "2x2", QUICK, steps=30, bound=120)
    with freezing("0.1", 8, held=4.0) as (freeze, found):
        outcome = runs.of(case, "one thread stops", meanwhile=freeze)
    runs.check_exact(outcome)
    assert not found["reaped"] and found["resumed"] < SUSPICION + 2.5, explain(outcome)


INSIDE = [
    pytest.param("sleep", "F of micro-batch 1.1 in step 5", 1, marks=pytest.mark.slow),
    ("lock", "F of micro-batch 1.1 in step 5", 1),
    pytest.param("spin", "F of micro-batch 1.1 in step 5", 10, marks=pytest.mark.slow),
    ("read", "reading the data of micro-batch 1.1 in step 5", 1),
]


@pytest.mark.parametrize(("kind", "where", "times"), INSIDE)
def test_an_op_that_does_not_end_is_found_with_and_without_the_interpreters_lock(
    kind, where, times, sabotaged, tmp_path
):
    plan = {"hang": kind, "stage": 1, "step": 5, "g": 5, "once": str(tmp_path / "hung")}
    case = Case(f"hangs in its forward ({kind})", "2x2", QUICK, steps=12)
    outcome = sabotaged.of(case, "one thread stops", environment={"RECYCLE_SABOTAGE": json.dumps(plan)})
    sabotaged.check_exact(outcome)
    (found,) = outcome.all("hang_suspected")
    assert found["where"] == where, explain(outcome)
    assert times * SUSPICION < found["seconds"] < times * SUSPICION + 2


def test_an_op_that_takes_five_hundred_times_as_long_and_computes_is_no_hang(sabotaged, tmp_path):
    """Far longer than the suspicion and ten times its profile: but its thread runs, or waits for a processor."""
    seconds = SUSPICION + 0.5
    plan = {"hang": "burn", "seconds": seconds, "stage": 1, "step": 5, "g": 5, "once": str(tmp_path / "slow")}
    case = Case("an op takes very long", "2x2", QUICK, steps=12, deaths=0)
    outcome = sabotaged.of(case, "false alarms", environment={"RECYCLE_SABOTAGE": json.dumps(plan)})
    sabotaged.check_exact(outcome)
    assert max(line["step_seconds"] for line in outcome.metrics) > seconds
    assert not outcome.all("hang_suspected") and not outcome.all("renewed"), explain(outcome)


def test_a_main_thread_that_does_not_get_on_with_a_checkpoint_is_found(sabotaged, tmp_path):
    plan = {"hang": "copy", "step": 6, "once": str(tmp_path / "hung")}
    case = Case("hangs as it copies its state", "2x2", (*QUICK, "checkpoint.every=6"), steps=12)
    outcome = sabotaged.of(case, "one thread stops", environment={"RECYCLE_SABOTAGE": json.dumps(plan)})
    sabotaged.check_exact(outcome)
    assert outcome.all("hang_suspected")[0]["where"] == "copying the state for a checkpoint in step 5"


def test_an_all_reduce_that_nobody_ends_costs_a_generation_and_no_worker(sabotaged, tmp_path):
    plan = {"hang": "reduce", "step": 5, "once": str(tmp_path / "hung")}
    case = Case("an all-reduce hangs", "2x2", QUICK, steps=12, deaths=0)
    outcome = sabotaged.of(case, "one thread stops", environment={"RECYCLE_SABOTAGE": json.dumps(plan)})
    sabotaged.check_exact(outcome)
    (renewed,) = outcome.all("renewed")
    assert renewed["step"] == 5 and not outcome.all("hang_suspected"), explain(outcome)


def test_a_slow_disk_costs_a_checkpoint_and_no_step(sabotaged, tmp_path):
    plan = {"hang": "save", "seconds": 4, "once": str(tmp_path / "hung")}
    case = Case("a checkpoint takes 4 s", "2x2", ("checkpoint.every=2",), steps=12, deaths=0)
    outcome = sabotaged.of(case, "one thread stops", environment={"RECYCLE_SABOTAGE": json.dumps(plan)})
    sabotaged.check_exact(outcome)
    (first, *_), saved = outcome.all("checkpoint_skipped"), outcome.all("checkpoint_saved")
    assert first["checkpoint"] == 4 and first["by"].startswith("worker"), explain(outcome)
    assert saved[-1]["checkpoint"] == 12
    longest = max(line["step_seconds"] for line in outcome.metrics[1:])
    assert longest < 2, "no step has waited for it"


@pytest.mark.slow
def test_after_a_saver_died_on_a_slow_disk_the_next_checkpoint_waits_for_those_who_still_write(sabotaged):
    """If it did not, it would fail for them, its own parts would be what the one after it fails for, and so on."""
    struck = fails("15:0.1@forward")
    case = Case("a saver dies where all disks are slow", "2x2", (*struck, "checkpoint.every=2"), steps=100)
    plan = {"hang": "save", "seconds": 0.8}
    outcome = sabotaged.of(case, "one thread stops", environment={"RECYCLE_SABOTAGE": json.dumps(plan)})
    sabotaged.check_exact(outcome)
    saved = [e["checkpoint"] for e in outcome.all("checkpoint_saved")]
    assert [step for step in saved if 16 <= step < 100] and not outcome.all("checkpoint_failed"), explain(outcome)


def test_a_file_system_that_never_answers_does_not_hold_up_the_end_of_the_job(sabotaged, tmp_path):
    plan = {"hang": "save", "once": str(tmp_path / "hung")}
    case = Case("a checkpoint never ends", "2x2", ("checkpoint.every=4", "control.lease=15"), steps=12, deaths=0,
                ends="checkpoint step-000012 was not saved: worker")  # fmt: skip
    outcome = sabotaged.of(case, "one thread stops", environment={"RECYCLE_SABOTAGE": json.dumps(plan)})
    assert outcome.code == 1 and [e["checkpoint"] for e in outcome.all("checkpoint_skipped")] == [8]
    assert outcome.summary["steps"] == 12, "training itself is complete"


@pytest.mark.parametrize("rank", [pytest.param(2, marks=pytest.mark.slow), 0])
def test_a_supervisor_whose_loop_stands_still_leaves_and_the_others_go_on(rank, runs):
    """Also that of the coordinator, on one node, under one launcher."""

    def freeze(job):
        wait_for_step(job, 6)
        with Frozen(job.supervisors()[rank], idle=True):
            job.wait(280)

    case = Case(f"the loop of rank {rank}'s supervisor stands still", "2x2", QUICK, steps=150, bound=300)
    outcome = runs.of(case, "one thread stops", meanwhile=freeze)
    runs.check_exact(outcome)
    assert f"rank {rank} exits: its event loop has been blocked" in outcome.output
    assert [e["worker"] for e in outcome.all("death_detected")] == [f"{rank // 2}.{rank % 2}"], explain(outcome)
    assert len(outcome.all("coordinator_elected")) == (rank == 0)


def test_a_supervisor_that_is_stopped_is_given_up_and_its_worker_told_to_go(runs):
    """And when it is there again, so is its worker."""
    stopped = Strike("started", "1.1", number=signal.SIGSTOP, resume=4.0, above=True)
    case = Case("a supervisor is stopped for 4 s", "2x2", QUICK, (stopped,), steps=250, bound=300)
    outcome = runs.of(case, "one thread stops")
    runs.check_exact(outcome)
    assert outcome.all("death_detected")[0]["cause"] == "node_loss"
    assert outcome.all("supervisor_back"), explain(outcome)
