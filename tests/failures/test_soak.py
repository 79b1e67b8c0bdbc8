"""Jobs on three nodes under random faults (tests/failures/soak), and the soak's own checks."""

import random
import subprocess
import sys
from dataclasses import replace
from itertools import islice

import pytest

from recycle_pp.config.compose import compose

from . import network
from .harness import Case, Outcome
from .soak.__main__ import Soak
from .soak.faults import KINDS, PLACES, draw
from .soak.options import COMMON, drawn

_missing = network.missing()
in_namespaces = pytest.mark.skipif(_missing is not None, reason=str(_missing))


def soak(folder, *options, seconds, module="tests.failures.soak"):
    command = [sys.executable, "-m", module, "--out", folder / "soak", *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds)
    print(done.stdout)
    return done


@pytest.mark.slow
@in_namespaces
@pytest.mark.torchrun
@pytest.mark.timeout(400)
def test_a_job_under_every_kind_of_short_fault_ends_with_the_bits_of_an_undisturbed_one(tmp_path):
    options = ("--minutes", "0", "--seed", "5", "--steps", "120", "--mean", "2", "--longest", "4")
    done = soak(tmp_path, *options, seconds=380)
    assert done.returncode == 0, done.stdout
    assert not list((tmp_path / "soak").glob("job-*")), "the folder of a job that passes all checks must be removed"


@in_namespaces
@pytest.mark.torchrun
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_minutes_of_faults_change_no_bit_and_leave_no_process_behind(tmp_path):
    done = soak(tmp_path, "--minutes", "10", "--seed", str(random.randrange(10**6)), seconds=1700)
    assert done.returncode == 0, done.stdout


@pytest.mark.torchrun
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_islands_that_come_and_go_have_equal_theta_and_read_no_sample_twice(tmp_path):
    options = ("--minutes", "5", "--seed", str(random.randrange(10**6)), "--mean", "6")
    done = soak(tmp_path, *options, seconds=1100, module="tests.failures.soak.islands")
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_jobs_with_random_options_end_with_the_bits_of_an_undisturbed_worker(tmp_path):
    options = ("--minutes", "5", "--seed", str(random.randrange(10**6)))
    done = soak(tmp_path, *options, seconds=1100, module="tests.failures.soak.options")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("seed", range(12))
def test_random_options_fit_together(seed):
    for part in drawn(random.Random(str(seed))).parts:
        settings = compose([*COMMON, *part.options])
        assert settings.parallel.pipelines * settings.parallel.stages > 1


def test_a_seed_determines_the_faults():
    first, again, other = (
        list(islice(draw(random.Random(seed), list(KINDS), mean=4.0, longest=60.0, stages=2), 500))
        for seed in ("1.0", "1.0", "1.1")
    )
    assert first == again != other
    assert {fault.kind for fault in first} == set(KINDS)
    for fault in first:
        low, high = KINDS[fault.kind].seconds
        assert low <= fault.seconds <= min(high, 60.0)
        assert fault.place != fault.other and {fault.place, fault.other} < set(range(PLACES))
        assert fault.stage in range(2)


STEPS = [{"step": step, "loss": 5.0 - step, "time": float(step)} for step in range(3)]
EQUAL = Outcome(
    case=Case("soak", "3x2", steps=3),
    code=0,
    seconds=1.0,
    output="",
    logs="",
    events=[],
    metrics=STEPS,
    summary={"weights_sha256": "a"},
    samples={0: [1, 2], 1: [3, 4], 2: [5, 6]},
)


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({}, []),
        ({"metrics": [*STEPS, STEPS[2]]}, ["metrics.jsonl has the steps [0, 1, 2, 2]"]),
        ({"metrics": STEPS[:2]}, ["metrics.jsonl has the steps [0, 1]", "losses differ"]),
        ({"samples": {0: [1, 2], 1: [3, 4], 2: [5, 5]}}, ["samples differ"]),
        ({"summary": {"weights_sha256": "b"}}, ["final weights differ"]),
        ({"summary": {}}, ["final weights differ"]),
    ],
)
def test_differences_from_the_undisturbed_run_are_reported(change, difference):
    assert Soak.compare(replace(EQUAL, **change), EQUAL) == difference
