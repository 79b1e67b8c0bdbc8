"""After deaths at any moments, the weights equal those of a fault-free run, bit for bit.

The tables in `matrix.py` are the cases. Each case runs real processes and must end within its bound. The loss of each
step and the SHA-256 of the final weights must equal those of a fault-free run, and no survivor may repeat an op.
"""

import pytest

from . import matrix
from .harness import Case, explain, fails, rejoins


def some(cases, quick):
    """The cases as parameters, all but the first `quick` marked as slow."""
    return [pytest.param(c, id=str(c), marks=[pytest.mark.slow] * (k >= quick)) for k, c in enumerate(cases)]


@pytest.mark.parametrize("case", some(matrix.tours(), quick=1))
def test_a_death_at_any_moment_changes_no_bit(case, runs):
    outcome = runs.of(case, "at every moment")
    runs.check_exact(outcome)
    # On a busy machine, a worker may return too late to die as planned.
    assert outcome.deaths >= len(matrix.MOMENTS) - 2, explain(outcome)


@pytest.mark.parametrize("case", some(matrix.BEFORE_AND_AFTER, quick=1))
def test_a_death_at_the_start_or_the_end_changes_no_bit(case, runs):
    runs.check_exact(runs.of(case, "at either end"))


@pytest.mark.parametrize("case", some(matrix.SEVERAL, quick=1))
def test_several_deaths_change_no_bit(case, runs):
    runs.check_exact(runs.of(case, "several"))


@pytest.mark.slow  # the tours have such deaths, too
@pytest.mark.parametrize("case", matrix.IN_A_RECOVERY, ids=str)
def test_a_death_during_a_recovery_changes_no_bit(case, runs):
    runs.check_exact(runs.of(case, "in a recovery"))


@pytest.mark.slow  # the tours have such deaths, too
@pytest.mark.parametrize("case", matrix.IN_A_RETURN, ids=str)
def test_a_death_during_a_return_changes_no_bit(case, runs):
    runs.check_exact(runs.of(case, "in a return"))


def test_a_death_among_workers_connected_by_gloo_groups_changes_no_bit(runs):
    faults = fails("3:0.1@backward", "5:1.0@allreduce") + rejoins("7:0.1")
    case = Case("over Gloo", "3x2", ("parallel.backend=gloo", *faults), steps=16, deaths=2)
    runs.check_exact(runs.of(case, "over Gloo"))


@pytest.mark.slow
def test_without_reproducible_sums_the_losses_differ_by_less_than_one_in_a_hundred_thousand(runs):
    quiet = runs.of(Case("no worker dies", "2x2", ("numerics=fp32",), steps=20, deaths=0), "float sums")
    faults = fails("4:0.1@backward", "9:1.0@allreduce") + rejoins("7:0.1")
    faulty = runs.of(Case("two die", "2x2", ("numerics=fp32", *faults), steps=20, deaths=2), "float sums")
    assert faulty.losses == pytest.approx(quiet.losses, rel=1e-5)
