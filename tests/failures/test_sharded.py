"""After deaths, a job with sharded state has the weights of a fault-free run with whole state, bit for bit.

The fault-free run is one worker without `parallel.sharded`.
"""

import json

import pytest

from . import matrix
from .harness import Case, SignalAt, explain, fails, rejoins
from .test_exactness import some

TWO, THREE = ("parallel.sharded=true",), ("parallel.sharded=true", "parallel.optimizer_copies=3")
STOP = matrix.STOP

MOMENTS = [*matrix.MOMENTS, "spread"]  # "heal" needs an earlier death in the same stage, so it has its own cases


def faults(moment, stage, step):
    if moment == "spread":
        return [f"{step}:1.{stage}@spread"], [f"{step + 3}:1.{stage}"]
    # The two deaths are in different stages, because two in one stage might take both copies of a unit.
    if moment in ("regroup", "adopt"):
        other = f"2.{(stage + 1) % 3}"
        fallen = [f"{step}:{other}@backward", f"{step}:1.{stage}@{moment}"]
        return fallen, [f"{step + 3}:{other}", f"{step + 3}:1.{stage}"]
    return matrix.Death(moment, stage).faults(step)


def tour(claim, of, copies, first, stagger):
    """A tour with each of these moments, at the stages in turn. With `stagger` clipping is off, because it would roll
    back every early update."""
    fallen, back = [], []
    for number, moment in enumerate(of):
        now, later = faults(moment, (first + number) % 3, 2 + STOP * number)
        fallen += now
        back += later
    overrides = (*fails(*fallen), *rejoins(*back), "checkpoint.every=4", "run.validate_every=4", *copies)
    overrides += ("optimizer.clip=null",) * stagger
    return Case(claim, "3x3", overrides, steps=2 + STOP * (len(of) + 1), stagger=stagger, deaths=None, bound=250)


half = len(MOMENTS) // 2
TOURS = [
    tour(
        f"{k} copies, {name} half of the moments, from stage {first}", of, copies, first, (first + k + number) % 2 == 0
    )
    for first in range(3)
    for k, copies in ((2, TWO), (3, THREE))
    for number, (name, of) in enumerate((("first", MOMENTS[:half]), ("second", MOMENTS[half:])))
]

SHAPE = ("parallel.pipelines=4", "parallel.stages=1", "parallel.microbatches=1")


@pytest.mark.slow  # quick counterparts: the next test, tests/recycle_pp/protocol/test_sharded_recovery.py
@pytest.mark.parametrize("case", TOURS, ids=str)
def test_a_death_at_any_moment_changes_no_bit(case, runs):
    outcome = runs.of(case, "sharded, at every moment")
    runs.check_exact(outcome)
    assert outcome.deaths >= half - 2, explain(outcome)
    assert not outcome.all("restored"), "a copy of every unit must survive each death"


SEVERAL = [
    Case(
        "both holders, the second after the copies are made, and one returns",
        "3x2",
        (*TWO, *fails("3:0.0@spread", "5:1.0@optimizer"), *rejoins("7:0.0"), "checkpoint.every=2"),
        deaths=2,
        steps=40,
    ),
    Case("two of three holders in one step", "3x2", (*THREE, *fails("3:0.1@backward", "3:2.1@vote")), deaths=2),
    Case("one after the other", "3x2", (*TWO, *fails("2:0.1@forward", "4:1.1@weight")), deaths=2),
    Case("two stages", "3x4", (*TWO, *fails("3:0.1@forward", "3:1.2@spread")), deaths=2),
    Case(
        "another worker while copies of a dead worker's units are made",
        "4x2",
        (*THREE, *fails("2:0.1@backward", "2:2.1@heal"), *rejoins("5:0.1", "5:2.1")),
        deaths=2,
        steps=40,
        bound=120,
    ),
    Case(
        "a donor while it sends to a returning worker",
        "3x2",
        (*THREE, *fails("2:0.1@backward", "2:2.1@donate"), *rejoins("6:0.1", "12:2.1")),
        deaths=2,
        steps=40,
    ),
    Case(
        "another worker when the death is detected",
        "3x2",
        (*THREE, *fails("3:0.1@vote")),
        (SignalAt("death_detected", "1.1"),),
        deaths=2,
    ),
    Case("in the last step", "2x2", (*TWO, *fails("7:1.1@vote"))),
    Case("after the last step", "2x2", (*TWO, *fails("7:0.1@commit"))),
    Case("over groups of Gloo", "3x2", (*TWO, *fails("3:0.1@spread", "5:1.0@vote"), "parallel.backend=gloo"), deaths=2),
    Case("while the last weights are sent", "3x2", (*TWO, *fails("7:0.1@spread"))),
    Case("in the last checkpoint", "3x2", (*TWO, *fails("7:0.0@checkpoint"), "checkpoint.every=8")),
    Case(
        "both holders in the last checkpoint",
        "3x2",
        (*TWO, *fails("7:0.0@checkpoint", "7:1.0@checkpoint"), "checkpoint.every=4"),
        deaths=None,
    ),
]


AHEAD = (*TWO, "optimizer.clip=null")  # without clipping, early updates are rolled back only if a worker dies
SEVERAL += [
    Case(
        "when it has updated early",
        "3x2",
        (*AHEAD, *fails("2:0.1@optimizer", "4:1.0@optimizer")),
        stagger=True,
        deaths=2,
    ),
    Case("in a stage that is a step ahead", "3x2", (*AHEAD, *fails("3:1.0@forward")), stagger=True),
    Case(
        "while weights of an early update are sent",
        "3x2",
        (*AHEAD, *fails("2:0.1@spread", "4:1.0@spread")),
        stagger=True,
        deaths=2,
    ),
    Case(
        "in a stage that is behind others",
        "3x4",
        (*AHEAD, *fails("3:0.3@weight", "5:1.0@vote")),
        stagger=True,
        deaths=2,
    ),
]


@pytest.mark.parametrize("case", some(SEVERAL, quick=1))
def test_several_deaths_change_no_bit(case, runs):
    runs.check_exact(runs.of(case, "sharded, several"))


@pytest.mark.slow
@pytest.mark.parametrize("stagger", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_stage_may_update_its_blocks_before_another_has_finished_its_backwards(stagger, runs):
    """The traces of the steps around deaths must show such an update, even on a busy machine."""
    faults = fails("5:1.0@forward", "10:0.0@forward")
    case = Case("seen from the traces", "3x2", (*AHEAD, *faults), steps=16, stagger=stagger, deaths=2)
    outcome = runs.of(case, "sharded, several")
    runs.check_exact(outcome)
    early = 0
    for trace in outcome.traces.values():
        updates = [op.start for op in trace.ops if op.kind == "O"]
        early += bool(updates) and min(updates) < max(op.end for op in trace.ops if op.kind != "O")
    assert (early > 0) == stagger, f"{early} of {len(outcome.traces)} steps"


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_deaths_with_clipping_parameter_groups_and_int32_sums_change_no_bit(precision, runs):
    numerics = (f"numerics.precision={precision}", "numerics.sums=int32", "optimizer.clip=0.02")
    faults = (*fails("2:0.1@backward", "4:1.0@spread"), *rejoins("5:0.1"))
    groups = ("optimizer.groups=[*norm*:0.5:0.3]",)
    stagger = precision == "bf16"  # clipping rolls back the first early update, and another one later
    case = Case(
        f"in {precision}", "3x2", (*TWO, *numerics, *groups, *faults), stagger=stagger, deaths=2, steps=14, bound=120
    )
    runs.check_exact(runs.of(case, "sharded, numerics"))


@pytest.mark.slow
def test_the_loss_of_all_copies_of_a_block_restarts_the_job_from_its_checkpoint(runs):
    """Two of the three workers of a stage hold a block. The second dies before the block is copied."""
    both = fails("17:1.1@backward", "17:2.1@heal")
    case = Case("both holders", "3x2", (*TWO, *both, "checkpoint.every=3"), deaths=2, steps=20)
    outcome = runs.of(case, "sharded, restored")
    (restored,) = outcome.all("restored")
    assert restored["checkpoint"] in (3, 6, 9, 12, 15), "must be a complete checkpoint; on a slow disk not the newest"
    assert restored["undone_from"] == restored["checkpoint"] and restored["undone_to"] == 16
    assert [line["step"] for line in outcome.metrics] == [*range(20)] == [*outcome.samples], explain(outcome)
    expected = runs.fault_free(case)
    assert outcome.summary["weights_sha256"] == expected.summary["weights_sha256"] is not None


def test_without_a_checkpoint_the_job_reports_the_lost_units_and_restarts_from_step_0(zygote):
    """Workers 0 and 2 hold the same units, and so do workers 1 and 3. Workers 0 and 2 die, so half of the units are
    lost."""
    arguments = Case("", "2x2").arguments[3:]
    both = fails("6:0.0@backward", "6:2.0@heal")
    with zygote.run([*arguments, *SHAPE, *TWO, "run.steps=20", "checkpoint.minutes=0", *both]) as job:
        assert job.wait(60) == 0, job.output
        lost = [e for e in job.run.lines(job.run.events) if e["event"] == "stage_lost"]
        assert "lost all copies of" in lost[0]["detail"], lost
        assert "all workers restart from step 0" in job.output


TWO_BY_TWO = ("parallel=2x2", "parallel.microbatches=2")


@pytest.mark.slow  # quick counterpart: test_surroundings.py resumes with another shape
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ((*TWO_BY_TWO, *TWO), SHAPE),
        (TWO_BY_TWO, (*SHAPE, *TWO)),
        ((*SHAPE, *TWO), (*SHAPE, *THREE)),
    ],
    ids=["sharded, then whole", "whole, then sharded", "two copies, then three"],
)
def test_a_run_resumes_with_another_shape_and_number_of_copies(first, then, zygote, tmp_path):
    """Runs with sharded and with whole state can load each other's checkpoints."""

    def weights(*overrides):
        with zygote.run([*Case("", "2x2").arguments[3:], "checkpoint.every=4", *overrides]) as job:
            assert job.wait(60) == 0, job.output
            return json.loads(job.run.summary.read_text())["weights_sha256"]

    whole, folder = weights(*TWO_BY_TWO, "run.steps=9"), f"run.dir={tmp_path}/run"
    weights(*first, "run.steps=5", folder)
    assert weights(*then, "run.steps=9", folder, "run.resume=true") == whole
