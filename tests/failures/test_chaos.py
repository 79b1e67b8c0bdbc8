"""`python -m recycle_pp.chaos` on a live job; and kills at random instants (slow)."""

import random
import subprocess
import sys

import pytest

from recycle_pp.chaos import main
from recycle_pp.telemetry.soak import table

from .harness import Case, Strike

FOREVER = ("run.respawns=100000", "control.heartbeat=0.1", "control.suspicion=1")


def soak(runs, shape, steps, options, bound, stagger=False):
    """A job under chaos: (its outcome, what chaos printed)."""
    case = Case("soak", shape, FOREVER, steps=steps, stagger=stagger, deaths=None, bound=bound)
    said = []

    def chaos(job):
        job.wait_for_event("started", 60)
        command = [sys.executable, "-m", "recycle_pp.chaos", "--run-dir", str(job.run.path), *options]
        said.append(subprocess.run(command, capture_output=True, text=True, timeout=bound, check=True).stdout)

    outcome = runs.of(case, "soak", meanwhile=chaos)
    return outcome, said[0]


@pytest.mark.parametrize("stagger", [False, True])
def test_a_job_under_chaos_ends_with_the_weights_of_a_quiet_one(stagger, runs):
    options = ["--mtbf", "1s", "--seed", "7", "--kinds", "all", "--until-step", "55"]
    outcome, said = soak(runs, "3x2", 60, options, 90, stagger)
    assert outcome.deaths >= 2, said
    runs.check_exact(outcome)
    assert "stall, 99 %" in said and "goodput" in said


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(4))
def test_fifty_kills_at_random_instants(seed, runs):
    options = ["--mtbf", "700ms", "--seed", str(seed), "--until-step", "2900"]
    outcome, said = soak(runs, "3x2", 3000, options, 1000, stagger=seed % 2 == 1)
    print(f"seed {seed}\n{said}")
    assert outcome.deaths >= 50, said
    runs.check_exact(outcome)


@pytest.mark.parametrize("instant", range(6))
def test_a_kill_at_a_random_instant_changes_no_bit(instant, runs):
    rng = random.Random(instant)
    victim = f"{rng.randrange(3)}.{rng.randrange(2)}"
    strike = Strike("started", victim, after=rng.uniform(0, 1.5))
    case = Case(
        f"killed at instant {instant}", "3x2", ("run.respawns=0",), (strike,), steps=15, stagger=instant % 2 == 1
    )
    runs.check_exact(runs.of(case, "random instants"))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--run-dir", "nowhere"], "--run-dir nowhere holds no run"),
        (["--mtbf", "soon"], "--mtbf must be a time above 0"),
        (["--kinds", "kill,tickle"], "--kinds must be some of kill, hang, pause, slow, evict, or all, not 'tickle'"),
        (["--trace", "nowhere.csv"], "--trace nowhere.csv must be a CSV"),
    ],
)
def test_wrong_options_are_one_sentence(options, sentence, tmp_path, capsys):
    (tmp_path / "events.jsonl").touch()
    assert main(["--run-dir", str(tmp_path), *options]) == 2
    assert sentence in capsys.readouterr().err


def test_the_table_of_a_run_without_events_is_no_error(tmp_path):
    from recycle_pp.telemetry.run_folder import RunFolder

    assert "deaths" in table(RunFolder(tmp_path))
