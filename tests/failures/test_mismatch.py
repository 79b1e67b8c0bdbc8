"""A worker whose sharded state is wrong, with control.mismatch=third: found in the next vote, killed, named, and the
weights are bit for bit those of a run in which nothing flipped.

`test_endings.py` has the same with control.mismatch=stop.
"""

import json
import socket

import pytest

from .harness import Case, explain, fails

SHARDED = ("parallel.sharded=true", "control.mismatch=third")
K3 = "parallel.optimizer_copies=3"


def run(runs, case, **plan):
    return runs.of(case, "mismatch", environment={"RECYCLE_SABOTAGE": json.dumps(plan)})


def struck(outcome, tmp_path):
    """Who was killed for it; whether it is the worker that was sabotaged."""
    (found,) = outcome.all("mismatch")
    (death,) = [e for e in outcome.all("death_detected") if e["cause"] == "mismatch"]
    workers = {str(e["pid"]): e["worker"] for e in outcome.all("spawned")}
    assert found["worker"] == death["worker"] == workers[(tmp_path / "flipped").read_text()], explain(outcome)
    assert found["host"] == socket.gethostname() and "block 0 of the optimizer's state of stage 1" in found["detail"]
    return found, death


@pytest.mark.parametrize(
    ("shape", "copies", "kind", "detail"),
    [
        pytest.param("2x2", (), "flip", "has changed since its update", marks=pytest.mark.slow),
        ("3x2", (), "rot", "has changed since its update"),
        pytest.param("3x2", (K3,), "flip", "has changed since its update", marks=pytest.mark.slow),
        ("3x2", (K3,), "err", "is not that of the other holders"),
    ],
)
def test_who_holds_a_wrong_master_is_killed_and_no_bit_of_the_result_is_another_one(
    shape, copies, kind, detail, sabotaged, tmp_path
):
    """flip: a bit of its weights, as it computes, where all hold all; rot: a bit of what it holds, before the step;
    err: its update of that step gives something wrong, which it does not notice."""
    case = Case(f"{kind} of a master", shape, (*SHARDED, *copies, "checkpoint.every=4"), steps=16, bound=150)
    outcome = run(sabotaged, case, **{kind: 1, "step": 5, "once": str(tmp_path / "flipped")})
    found, _ = struck(outcome, tmp_path)
    assert found["detail"].endswith(detail) and found["step"] == (6 if kind == "err" else 5), explain(outcome)
    assert [e["worker"] for e in outcome.all("respawned")] == [found["worker"]], "it comes back, with copies of others"
    sabotaged.check_exact(outcome)


def test_a_checkpoint_of_a_wrong_block_is_not_finished_and_the_job_goes_on(sabotaged, tmp_path):
    """The update after step 7 errs: its checkpoint is of 8 steps."""
    case = Case("err before a checkpoint", "3x2", (*SHARDED, K3, "checkpoint.every=8"), steps=18, bound=150)
    outcome = run(sabotaged, case, err=1, step=7, once=str(tmp_path / "flipped"))
    struck(outcome, tmp_path)
    assert [e["checkpoint"] for e in outcome.all("checkpoint_failed")] == [8], explain(outcome)
    saved = [e["checkpoint"] for e in outcome.all("checkpoint_saved")]
    assert saved in ([16, 18], [18]), "the last one does not wait for the one before"
    sabotaged.check_exact(outcome)


def test_of_two_that_do_not_agree_and_saw_nothing_the_job_ends_and_says_that_nobody_can_tell(sabotaged, tmp_path):
    says = "and nobody can tell which of them is right"
    case = Case("err, and two copies", "2x2", SHARDED, steps=40, deaths=0, ends=says, bound=150)
    outcome = run(sabotaged, case, err=1, step=5, once=str(tmp_path / "flipped"))
    last = outcome.output.splitlines()[-1]
    assert outcome.code == 1 and "workers 0.1 on " in last and "hold different copies of block 0" in last
    assert f"found in step 6, {says}" in last, explain(outcome)


def test_somebody_else_may_die_as_it_is_found(sabotaged, tmp_path):
    dies = fails("6:0.0@regroup")  # of the other stage: anybody of stage 1 may be the wrong one
    case = Case("flip, and another death", "3x2", (*SHARDED, K3, *dies), steps=16, deaths=2, bound=150)
    outcome = run(sabotaged, case, flip=1, step=6, once=str(tmp_path / "flipped"))
    struck(outcome, tmp_path)
    sabotaged.check_exact(outcome)
