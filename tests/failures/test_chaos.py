"""Tests of `python -m recycle_pp.chaos` on live jobs, and kills at random instants (slow)."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from recycle_pp.chaos import Hitter, Live, changes_of, main
from recycle_pp.telemetry.chaos_table import Usage, table
from recycle_pp.telemetry.run_folder import RunFolder

from .harness import Case, SignalAt, explain

FOREVER = ("run.respawns=100000", "control.heartbeat=0.1", "control.suspicion=1")


MOVING = ("model.layers=8", "model.split=null", "schedule.rebalance=always", "schedule.profile_steps=0")
PATIENT = ("control.suspicion=10",)  # so that a worker on a busy machine does not count as hung


def soak(runs, shape, steps, options, bound, stagger=False, overrides=()):
    """Runs a job under chaos. Returns (outcome of the job, output of chaos)."""
    case = Case("soak", shape, (*FOREVER, *overrides), steps=steps, stagger=stagger, deaths=None, bound=bound)
    said = []

    def chaos(job):
        job.wait_for_event("started", 60)
        command = [sys.executable, "-m", "recycle_pp.chaos", "--run-dir", str(job.run.path), *options]
        said.append(subprocess.run(command, capture_output=True, text=True, timeout=bound, check=True).stdout)

    outcome = runs.of(case, "soak", meanwhile=chaos)
    return outcome, said[0]


@pytest.mark.parametrize("stagger", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_job_under_chaos_ends_with_the_weights_of_an_undisturbed_one(stagger, runs):
    """A fast machine does 40 steps per second. Chaos takes a second or two to start, so there are about two seconds of
    faults, of which about 60 % are kills."""
    options = ["--mtbf", "250ms", "--seed", "7", "--kinds", "all", "--until-step", "130"]
    outcome, said = soak(runs, "3x2", 140, options, 120, stagger)
    assert outcome.deaths >= 2, said
    runs.check_exact(outcome)
    assert "stall, 99 %" in said and "goodput" in said


def fake_worker(module="recycle_pp.execution.worker"):
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", module])


def spawned(worker, pid, ago=0.0):
    of_process = {"event": "spawned", "worker": worker, "rank": 0, "pid": pid, "host": socket.gethostname()}
    return of_process | {"time": time.time() - ago}


def record(run, *events):
    with run.events.open("a") as file:
        for event in events:
            file.write(json.dumps({"time": time.time(), "step": 0, "generation": 0, "term": 0} | event) + "\n")


def wait_until(holds, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def stopped(process):
    return psutil.Process(process.pid).status() == psutil.STATUS_STOPPED


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_chaos_and_wakes_the_workers_that_it_holds_back(number, tmp_path):
    run, trace = RunFolder(tmp_path), tmp_path / "trace.csv"
    trace.write_text("minute,workers\n0,2\n0.001,1\n60,2\n")
    with fake_worker() as first, fake_worker() as second:
        record(run, spawned("0.0", first.pid), {"event": "started", "workers": 1}, {"event": "plan_adopted"})
        command = [sys.executable, "-m", "recycle_pp.chaos", "--run-dir", str(tmp_path), "--cruel"]
        # The tests may run where this signal is ignored, for instance under nohup.
        as_usual = partial(signal.signal, number, signal.SIG_DFL)
        command += ["--trace", str(trace)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=as_usual) as chaos:
            assert first.wait(20) == -signal.SIGKILL
            record(run, spawned("0.0", second.pid))
            wait_until(lambda: stopped(second))
            chaos.send_signal(number)
            assert "goodput" in chaos.communicate(timeout=20)[0] and chaos.returncode == 0
        wait_until(lambda: not stopped(second))
        second.kill()


def test_chaos_under_nohup_outlives_its_terminal(tmp_path):
    with fake_worker() as worker:
        record(RunFolder(tmp_path), spawned("0.0", worker.pid), {"event": "started", "workers": 1})
        command = [sys.executable, "-m", "recycle_pp.chaos", "--run-dir", str(tmp_path), "--mtbf", "1h"]
        with subprocess.Popen(["nohup", *command], stdout=subprocess.PIPE, text=True) as chaos:
            wait_until(lambda: _catches(chaos.pid, signal.SIGTERM))
            chaos.send_signal(signal.SIGHUP)
            with pytest.raises(subprocess.TimeoutExpired):
                chaos.wait(0.5)
            chaos.send_signal(signal.SIGTERM)
            assert "goodput" in chaos.communicate(timeout=20)[0] and chaos.returncode == 0
        worker.kill()


def _catches(pid, number):
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught, 16) >> (number - 1) & 1)


@pytest.mark.parametrize("kind", ["pause", "slow"])
def test_the_end_of_chaos_wakes_a_paused_worker(kind):
    with fake_worker() as process:
        hitter = Hitter()
        hitter.hit(kind, process.pid, random.Random(1))
        wait_until(lambda: stopped(process))
        hitter.close()
        wait_until(lambda: not stopped(process))
        process.kill()


@pytest.mark.parametrize("ended", [[{"event": "stopped", "reason": "SIGTERM", "code": 143}], []])
def test_after_a_resume_with_fewer_pipelines_the_last_member_of_a_stage_is_no_victim(ended, tmp_path, monkeypatch):
    monkeypatch.setattr("recycle_pp.chaos._is_of", lambda pid, at: True)
    run, begin = RunFolder(tmp_path), [{"event": "plan_adopted"}]
    record(run, *(spawned(f"{d}.0", 100 + d) for d in range(3)), {"event": "started", "workers": 3}, *begin, *ended)
    record(run, *(spawned(f"{d}.0", 200 + d) for d in range(2)), {"event": "started", "workers": 2}, *begin)
    live = Live(run)
    live.update()
    assert live.victims(cruel=False) == ["0.0", "1.0"]
    live.remove("1.0")
    assert live.victims(cruel=False) == []


def test_damaged_events_are_reported_in_one_sentence(tmp_path, capsys):
    (tmp_path / "events.jsonl").write_text("hello\nhello\n")
    assert main(["--run-dir", str(tmp_path)]) == 2
    assert "events.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ago", "module", "found"),
    [(0.0, "recycle_pp.execution.worker", True), (600.0, "recycle_pp.execution.worker", False), (0.0, "else", False)],
)
def test_a_process_that_has_the_number_of_a_worker_is_never_hit(ago, module, found, tmp_path):
    """Such a process can exist if the job's machine was restarted, or if the job runs in a container that has the
    machine's name."""
    run = RunFolder(tmp_path)
    with fake_worker(module) as process:
        record(run, spawned("0.0", process.pid, ago))
        live = Live(run)
        live.update()
        process.kill()
    assert live.pids == ({"0.0": process.pid} if found else {})


@pytest.mark.slow
def test_workers_leave_and_return_according_to_a_trace(runs, tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("minute,workers\n0,6\n1,5\n2,4\n4,6\n")
    steps = 300  # ten seconds on a fast machine, so workers that return after two seconds still find the job
    outcome, said = soak(runs, "3x2", steps, ["--trace", str(trace), "--speed", "120"], 120, overrides=PATIENT)
    runs.check_exact(outcome)
    assert outcome.deaths == 2 and said.count("return") == 2, said
    assert len(outcome.all("rejoined")) == 2, explain(outcome)
    least = min(line["live_workers"] for line in outcome.metrics)
    assert least == 4, "both workers must be away at the same time"


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_job_survives_two_thousand_deaths_of_twelve_workers(runs):
    """Ops are short sleeps, so recoveries dominate. There are no weights to compare, but every step must commit."""
    slots = tuple(f"emulate.{op}=0.006" for op in "FIWO")
    options = ["--mtbf", "500ms", "--seed", "7", "--kinds", "kill,hang,pause,slow"]
    outcome, said = soak(runs, "3x4", 12_000, options, 7000, overrides=("emulate=sleep", *slots))
    print(said)
    assert outcome.deaths >= 2000, said
    assert len(outcome.losses) == 12_000


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(4))
def test_fifty_kills_at_random_instants_change_no_bit(seed, runs):
    options = ["--mtbf", "500ms", "--seed", str(seed), "--until-step", "950"]
    outcome, said = soak(runs, "3x2", 1000, options, 500, stagger=seed % 2 == 1)
    print(f"seed {seed}\n{said}")
    assert outcome.deaths >= 50, said
    runs.check_exact(outcome)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(4))
def test_kills_at_random_instants_among_moves_of_layers_change_no_bit(seed, runs):
    """Layers begin to move after each death, and to move back after each return. Some moves are abandoned. The state is
    not sharded, because so many deaths would soon take both copies of a unit."""
    options = ["--mtbf", "1s", "--seed", str(seed), "--until-step", "230"]
    outcome, said = soak(runs, "3x2", 250, options, 900, stagger=seed > 1, overrides=MOVING)
    ended = {name: len(outcome.all(name)) for name in ("rebalanced", "rebalancing_abandoned")}
    print(f"seed {seed}, {ended}\n{said}")
    assert outcome.deaths >= 20 and ended["rebalanced"], said
    runs.check_exact(outcome)


@pytest.mark.slow
@pytest.mark.parametrize("instant", range(6))
def test_a_kill_at_a_random_instant_changes_no_bit(instant, runs):
    rng = random.Random(instant)
    victim = f"{rng.randrange(3)}.{rng.randrange(2)}"
    kill = SignalAt("started", victim, after=rng.uniform(0, 1.5))
    case = Case(f"killed at instant {instant}", "3x2", ("run.respawns=0",), (kill,), steps=60, stagger=instant % 2 == 1)
    runs.check_exact(runs.of(case, "random instants"))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--run-dir", "nowhere"], "--run-dir nowhere contains no run"),
        (["--mtbf", "soon"], "--mtbf must be a time above 0"),
        (
            ["--kinds", "kill,tickle"],
            "--kinds must be one or more of kill, hang, pause, slow, evict, or all, not 'tickle'",
        ),
        (["--speed", "nan"], "--speed must be a number above 0, not nan"),
        (["--trace", "nowhere.csv"], "--trace nowhere.csv cannot be read: No such file"),
    ],
)
def test_wrong_options_are_reported_in_one_sentence(options, sentence, tmp_path, capsys):
    (tmp_path / "events.jsonl").touch()
    assert main(["--run-dir", str(tmp_path), *options]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["minute,workers\n0,6\n1,5\n2,4\n4,5\n", "minute,machine,up\n0,c,1\n1,a,0\n2,b,down\n4,a,up\n"]
)
def test_a_trace_of_counts_or_of_machines_gives_the_times_of_deaths_and_returns(text, tmp_path):
    (tmp_path / "trace.csv").write_text(text)
    assert list(changes_of(str(tmp_path / "trace.csv"), speed=60.0)) == [(1.0, False), (2.0, False), (4.0, True)]


def test_the_end_of_a_slowdown_does_not_wake_a_hung_worker():
    """Otherwise it would live on without ever being a victim again, and long soaks would run out of victims."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        try:
            hitter = Hitter()
            hitter.hit("slow", process.pid, random.Random(1))  # lasts at least a second
            time.sleep(0.1)
            hitter.hit("hang", process.pid, random.Random(1))
            while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
                time.sleep(0.01)  # on a busy machine, a process that is starting handles the signal late
            states = set()
            for _ in range(50):
                time.sleep(0.01)
                states.add(psutil.Process(process.pid).status())
            assert states == {psutil.STATUS_STOPPED}
        finally:
            process.kill()


def test_a_process_with_the_id_of_a_hung_one_is_only_paused():
    """Process ids recur after about ten minutes of kills. A new process that stayed stopped would count as alive."""
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            hitter = Hitter()
            hitter.hit("hang", process.pid, random.Random(1))
            process.send_signal(signal.SIGCONT)  # stands for a new process with the same id
            hitter.hit("pause", process.pid, random.Random(1))
            time.sleep(1.0)
            assert psutil.Process(process.pid).status() != psutil.STATUS_STOPPED
        finally:
            process.kill()


def test_the_size_is_measured_for_live_processes_only():
    usage = Usage()
    usage.measure([os.getpid(), 2**22 + 1])
    (worker,) = usage.workers
    assert worker.mib > 1 and worker.threads >= 1 and worker.descriptors >= 3
    assert [name.split(":")[0] for name, _ in usage.rows()] == ["largest worker", "largest supervisor"]


def test_the_table_of_a_run_without_events_can_be_printed(tmp_path):
    from recycle_pp.telemetry.run_folder import RunFolder

    assert "deaths" in table(RunFolder(tmp_path))
