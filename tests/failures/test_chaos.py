"""`python -m recycle_pp.chaos` on a live job; and kills at random instants (slow)."""

import os
import random
import signal
import subprocess
import sys
import time

import psutil
import pytest

from recycle_pp.chaos import Hitter, changes_of, main
from recycle_pp.telemetry.soak import Usage, table

from .harness import Case, Strike, explain

FOREVER = ("run.respawns=100000", "control.heartbeat=0.1", "control.suspicion=1")


PATIENT = ("control.suspicion=10",)  # a busy machine is no hang


def soak(runs, shape, steps, options, bound, stagger=False, overrides=()):
    """A job under chaos: (its outcome, what chaos printed)."""
    case = Case("soak", shape, (*FOREVER, *overrides), steps=steps, stagger=stagger, deaths=None, bound=bound)
    said = []

    def chaos(job):
        job.wait_for_event("started", 60)
        command = [sys.executable, "-m", "recycle_pp.chaos", "--run-dir", str(job.run.path), *options]
        said.append(subprocess.run(command, capture_output=True, text=True, timeout=bound, check=True).stdout)

    outcome = runs.of(case, "soak", meanwhile=chaos)
    return outcome, said[0]


@pytest.mark.parametrize("stagger", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_job_under_chaos_ends_with_the_weights_of_a_quiet_one(stagger, runs):
    """A fast machine does 30 steps a second: five seconds of strikes, some six of ten of which are kills."""
    options = ["--mtbf", "400ms", "--seed", "7", "--kinds", "all", "--until-step", "140"]
    outcome, said = soak(runs, "3x2", 150, options, 120, stagger)
    assert outcome.deaths >= 2, said
    runs.check_exact(outcome)
    assert "stall, 99 %" in said and "goodput" in said


@pytest.mark.slow
def test_a_trace_takes_workers_away_and_gives_them_back(runs, tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("minute,workers\n0,6\n1,5\n2,4\n4,6\n")
    steps = 300  # ten seconds on a fast machine: those who come back in the second one still find the job
    outcome, said = soak(runs, "3x2", steps, ["--trace", str(trace), "--speed", "120"], 120, overrides=PATIENT)
    runs.check_exact(outcome)
    assert outcome.deaths == 2 and said.count("return") == 2, said
    assert len(outcome.all("rejoined")) == 2, explain(outcome)
    least = min(line["live_workers"] for line in outcome.metrics)
    assert least == 4, "both were away at once"


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_two_thousand_deaths_of_twelve_workers(runs):
    """Compute is slept, so that the recoveries are what takes the time: no weights to compare, every step to commit."""
    slots = tuple(f"emulate.{op}=0.006" for op in "FIWO")
    options = ["--mtbf", "500ms", "--seed", "7", "--kinds", "kill,hang,pause,slow"]
    outcome, said = soak(runs, "3x4", 12_000, options, 7000, overrides=("emulate=sleep", *slots))
    print(said)
    assert outcome.deaths >= 2000, said
    assert len(outcome.losses) == 12_000


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(4))
def test_fifty_kills_at_random_instants(seed, runs):
    options = ["--mtbf", "500ms", "--seed", str(seed), "--until-step", "950"]
    outcome, said = soak(runs, "3x2", 1000, options, 500, stagger=seed % 2 == 1)
    print(f"seed {seed}\n{said}")
    assert outcome.deaths >= 50, said
    runs.check_exact(outcome)


@pytest.mark.parametrize("instant", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 2, 3, 4, 5))])
def test_a_kill_at_a_random_instant_changes_no_bit(instant, runs):
    rng = random.Random(instant)
    victim = f"{rng.randrange(3)}.{rng.randrange(2)}"
    strike = Strike("started", victim, after=rng.uniform(0, 1.5))
    case = Case(
        f"killed at instant {instant}", "3x2", ("run.respawns=0",), (strike,), steps=60, stagger=instant % 2 == 1
    )
    runs.check_exact(runs.of(case, "random instants"))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--run-dir", "nowhere"], "--run-dir nowhere holds no run"),
        (["--mtbf", "soon"], "--mtbf must be a time above 0"),
        (
            ["--kinds", "kill,tickle"],
            "--kinds must be one or more of kill, hang, pause, slow, evict, or all, not 'tickle'",
        ),
        (["--trace", "nowhere.csv"], "--trace nowhere.csv cannot be read: No such file"),
    ],
)
def test_wrong_options_are_one_sentence(options, sentence, tmp_path, capsys):
    (tmp_path / "events.jsonl").touch()
    assert main(["--run-dir", str(tmp_path), *options]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["minute,workers\n0,6\n1,5\n2,4\n4,5\n", "minute,machine,up\n0,c,1\n1,a,0\n2,b,down\n4,a,up\n"]
)
def test_a_trace_of_counts_or_of_machines_gives_the_times_of_deaths_and_returns(text, tmp_path):
    (tmp_path / "trace.csv").write_text(text)
    assert list(changes_of(str(tmp_path / "trace.csv"), speed=60.0)) == [(1.0, False), (2.0, False), (4.0, True)]


def test_a_worker_that_hangs_while_it_is_slow_stays_hung():
    """Else it is struck from the list and never struck again: long soaks ran out of victims."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        try:
            hitter = Hitter()
            hitter.hit("slow", process.pid, random.Random(1))  # for a second at least
            time.sleep(0.1)
            hitter.hit("hang", process.pid, random.Random(1))
            while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
                time.sleep(0.01)  # a process that starts on a busy machine hears the signal when it gets its turn
            states = set()
            for _ in range(50):
                time.sleep(0.01)
                states.add(psutil.Process(process.pid).status())
            assert states == {psutil.STATUS_STOPPED}
        finally:
            process.kill()


def test_a_process_with_the_number_of_one_that_hung_is_only_paused():
    """Numbers come again after some ten minutes of kills; it would hang, and chaos would take it for alive."""
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            hitter = Hitter()
            hitter.hit("hang", process.pid, random.Random(1))
            process.send_signal(signal.SIGCONT)  # another one, as far as the number tells
            hitter.hit("pause", process.pid, random.Random(1))
            time.sleep(1.0)
            assert psutil.Process(process.pid).status() != psutil.STATUS_STOPPED
        finally:
            process.kill()


def test_the_size_of_processes_is_looked_up_as_far_as_they_live():
    usage = Usage()
    usage.look([os.getpid(), 2**22 + 1])
    (worker,) = usage.workers
    assert worker.mib > 1 and worker.threads >= 1 and worker.descriptors >= 3
    assert [name.split(":")[0] for name, _ in usage.rows()] == ["largest worker", "largest supervisor"]


def test_the_table_of_a_run_without_events_is_no_error(tmp_path):
    from recycle_pp.telemetry.run_folder import RunFolder

    assert "deaths" in table(RunFolder(tmp_path))
