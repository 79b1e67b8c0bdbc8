"""The last worker of a stage dies, its understudy takes over, and no bit changes. No checkpoint is read."""

import pytest

from .harness import Case, explain, fails

slow = pytest.mark.slow
KEPT = ("state.understudy=auto", "run.respawns=0")


def last_dies(moment, first=1, last=0):
    """W(first,1) dies, and then W(last,1) when its understudy is in step."""
    return (*KEPT, *fails(f"3:{first}.1@backward", f"14:{last}.1@{moment}"))


CASES = [
    Case("the last worker dies in a backward", "2x2", last_dies("backward"), steps=18, deaths=2),
    pytest.param(Case("at the vote", "2x2", last_dies("vote"), steps=18, deaths=2, stagger=True), marks=slow),
    pytest.param(Case("at the commit", "2x2", last_dies("commit"), steps=18, deaths=2), marks=slow),
    pytest.param(Case("in the sum", "2x2", last_dies("allreduce"), steps=18, deaths=2, stagger=True), marks=slow),
    pytest.param(
        Case("in bf16", "2x2", (*last_dies("forward"), "numerics.precision=bf16"), steps=18, deaths=2), marks=slow
    ),
    pytest.param(
        Case("with int32 sums", "2x2", (*last_dies("vote"), "numerics.sums=int32"), steps=18, deaths=2), marks=slow
    ),
    pytest.param(
        Case("before a checkpoint", "2x2", (*last_dies("commit"), "checkpoint.every=5"), steps=18, deaths=2), marks=slow
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_understudy_takes_over_the_stage_of_a_dead_last_worker_and_no_bit_changes(case, runs):
    outcome = runs.of(case, "understudies")
    runs.check_exact(outcome)
    (took,) = outcome.all("took_over")
    assert (took["worker"], took["step"]) == ("0.1", 14 + ("@commit" in str(case.overrides))), explain(outcome)
    assert not outcome.all("restored") + outcome.all("stage_lost"), explain(outcome)
