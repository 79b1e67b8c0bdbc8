"""A mistake in a user's model ends the job with exit code 2, and the output shows the exception with file and line."""

import re

import pytest

from tests.recycle_pp.model.general import broken

pytestmark = pytest.mark.timeout(200)
slow = pytest.mark.slow
FILE = re.escape(broken.__file__)
COMMON = (
    "model=custom", f"model.build={broken.__name__}:Broken", f"model.loss={broken.__name__}:loss",
    "model.layers=blocks", "parallel=2x2", "model.sequence=16", "run.steps=3", "run.validate_every=0",
)  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "sentence"),
    [
        pytest.param("build", rf"raised KeyError: 'no such size' \({FILE}, line \d+, in __init__\)", marks=slow),
        ("forward", rf"its forward or loss raised RuntimeError: .*3, 3.* \({FILE}, line \d+, in forward\)"),
        pytest.param(
            "loss",
            rf"its forward or loss raised AttributeError: .*targets.* \({FILE}, line \d+, in loss\)",
            marks=slow,
        ),
        pytest.param("values", rf"its Python must depend on values: .* \({FILE}, line \d+, in forward\)", marks=slow),
        (
            "step",
            rf"failed in F of micro-batch .*: ArithmeticError: such logits cannot be \({FILE}, line \d+, in refuse",
        ),
    ],
)
def test_an_exception_in_the_model_is_shown_with_file_and_line_and_exits_with_2(zygote, mode, sentence):
    with zygote.run([*COMMON], environment={"MODE": mode}) as job:
        assert job.wait(100) == 2, job.output
        assert re.search(sentence, job.output), job.output
        assert "run.resume" not in job.output and "no live worker" not in job.output.splitlines()[-1]


@slow
def test_with_one_worker_per_stage_the_same_exception_is_not_reported_as_a_lost_stage(zygote):
    with zygote.run([*COMMON, "parallel.pipelines=1"], environment={"MODE": "step"}) as job:
        assert job.wait(100) == 2, job.output
        assert "ArithmeticError: such logits cannot be" in job.output.splitlines()[-1]


def test_a_group_that_matches_no_parameter_is_rejected_with_similar_names(zygote):
    with zygote.run([*COMMON, "optimizer.groups=[block.*:0.1]"]) as job:
        assert job.wait(100) == 2, job.output
        assert "optimizer.groups: block.* matches no parameter; similar names: blocks." in job.output
    with zygote.run(["parallel=1x1", "model=tiny", "run.steps=1", "optimizer.groups=[nosuch:0.1]"]) as job:
        assert job.wait(100) == 2, job.output
        assert "optimizer.groups: nosuch matches no parameter" in job.output


@pytest.mark.parametrize(
    "shape", [("parallel=2x2",), pytest.param(("parallel=1x1", "parallel.microbatches=2"), marks=slow)]
)
def test_a_model_that_shifts_its_labels_itself_is_rejected_in_the_first_step(zygote, shape):
    with zygote.run([*COMMON, *shape, f"model.loss={broken.__name__}:shifted"]) as job:
        assert job.wait(100) == 2, job.output
        assert "shifts the labels once more" in job.output.splitlines()[-1], job.output
        assert not job.run.lines(job.run.metrics), "no step may be committed"


@slow
def test_a_loss_without_the_last_position_can_be_trained(zygote):
    with zygote.run([*COMMON, f"model.loss={broken.__name__}:without_the_last"]) as job:
        assert job.wait(100) == 0, job.output
