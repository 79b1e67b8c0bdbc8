"""With control.mismatch=third, a worker with wrong sharded state is found in the next vote, named and killed.

The final weights are those of a run without errors, bit for bit. `test_endings.py` tests the same errors with
control.mismatch=stop.
"""

import json
import re
import socket

import pytest

from .harness import Case, explain, fails

SHARDED = ("parallel.sharded=true", "control.mismatch=third")
K3 = "parallel.optimizer_copies=3"


def run(runs, case, **plan):
    return runs.of(case, "mismatch", environment={"RECYCLE_SABOTAGE": json.dumps(plan)})


def killed(outcome, tmp_path):
    """The mismatch event and the death of the killed worker. Checks that it is the sabotaged worker."""
    (found,) = outcome.all("mismatch")
    (death,) = [e for e in outcome.all("death_detected") if e["cause"] == "mismatch"]
    workers = {str(e["pid"]): e["worker"] for e in outcome.all("spawned")}
    assert found["worker"] == death["worker"] == workers[(tmp_path / "flipped").read_text()], explain(outcome)
    assert found["host"] == socket.gethostname() and re.search(r"unit 0 of layer \d+ \(", found["detail"])
    return found, death


@pytest.mark.parametrize(
    ("shape", "copies", "kind", "detail"),
    [
        pytest.param("2x2", (), "flip", "has changed since its update", marks=pytest.mark.slow),
        pytest.param("3x2", (), "rot", "has changed since its update", marks=pytest.mark.slow),
        pytest.param("3x2", (K3,), "flip", "has changed since its update", marks=pytest.mark.slow),
        ("3x2", (K3,), "err", "differs from the other holders' copies"),
    ],
)
def test_a_worker_with_a_wrong_master_is_killed_and_no_bit_of_the_result_changes(
    shape, copies, kind, detail, sabotaged, tmp_path
):
    """The worker has one of three kinds of errors.

    flip  a bit of its weights flips during the compute
    rot   a bit of a block that it holds flips before the step
    err   its update in that step is wrong, which it cannot detect itself
    """
    case = Case(f"{kind} of a master", shape, (*SHARDED, *copies, "checkpoint.every=4"), steps=16, bound=150)
    outcome = run(sabotaged, case, **{kind: 1, "step": 5, "once": str(tmp_path / "flipped")})
    found, _ = killed(outcome, tmp_path)
    assert found["detail"].endswith(detail) and found["step"] == (6 if kind == "err" else 5), explain(outcome)
    assert [e["worker"] for e in outcome.all("respawned")] == [found["worker"]], (
        "only the killed worker may restart, with its peers' copies"
    )
    sabotaged.check_exact(outcome)


@pytest.mark.slow
def test_a_checkpoint_with_a_wrong_block_is_not_completed_and_the_job_continues(sabotaged, tmp_path):
    """The update of step 7 is wrong, so the checkpoint after 8 steps contains it."""
    case = Case("err before a checkpoint", "3x2", (*SHARDED, K3, "checkpoint.every=8"), steps=18, bound=150)
    outcome = run(sabotaged, case, err=1, step=7, once=str(tmp_path / "flipped"))
    killed(outcome, tmp_path)
    assert [e["checkpoint"] for e in outcome.all("checkpoint_failed")] == [8], explain(outcome)
    saved = [e["checkpoint"] for e in outcome.all("checkpoint_saved")]
    assert saved in ([16, 18], [18]), "the last checkpoint must be saved; it does not wait for the one before"
    sabotaged.check_exact(outcome)


@pytest.mark.slow
def test_if_two_copies_differ_without_a_detected_error_the_job_stops(sabotaged, tmp_path):
    says = "and it is unknown which one is right"
    case = Case("err, and two copies", "2x2", SHARDED, steps=40, deaths=0, ends=says, bound=150)
    outcome = run(sabotaged, case, err=1, step=5, once=str(tmp_path / "flipped"))
    last = outcome.output.splitlines()[-1]
    assert outcome.code == 1 and "workers 0.1 on " in last and "hold different copies of unit 0" in last
    assert f"found in step 6, {says}" in last, explain(outcome)


@pytest.mark.slow
def test_another_worker_may_die_when_a_mismatch_is_found(sabotaged, tmp_path):
    dies = fails("6:0.0@regroup")  # in stage 0, because in stage 1 it might be the worker with the error
    case = Case("flip, and another death", "3x2", (*SHARDED, K3, *dies), steps=16, deaths=2, bound=150)
    outcome = run(sabotaged, case, flip=1, step=6, once=str(tmp_path / "flipped"))
    killed(outcome, tmp_path)
    sabotaged.check_exact(outcome)
