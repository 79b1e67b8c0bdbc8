"""val_loss uses the same held-out samples and has the same bits for any D and P and any deaths (real jobs)."""

import json
from functools import cache
from pathlib import Path

import pytest

from recycle_pp.config.checks import validate
from recycle_pp.config.compose import compose
from recycle_pp.data.batches import Batches

pytestmark = pytest.mark.timeout(120)

TEXT = Path(json.__file__).with_name("decoder.py")
COMMON = ["model=tiny", "numerics=reproducible", f"data.path={TEXT}", "data.validation_share=0.2", "run.steps=4"]
COMMON += ["run.validate_every=2", "model.sequence=32"]
ALONE = ("parallel=1x1", "parallel.microbatches=12")
CASES = [
    ("parallel=12x1", "parallel.microbatches=1"),
    ("parallel=3x2", "parallel.microbatches=4", "+fail_at=[1:0.0@validation,3:2.1@validation]"),
    ("parallel=2x3", "parallel.microbatches=6", "optimizer=staggered", "+fail_at=0:0.1"),
]
MORE = [
    ("parallel=3x2", "parallel.microbatches=4"),
    ("parallel=2x3", "parallel.microbatches=6"),
    ("parallel=3x2", "parallel.microbatches=4", "+fail_at=1:1.1@validation"),
    ("parallel=2x2", "parallel.microbatches=6", "parallel.backend=gloo", "+fail_at=1:1.0@validation"),
]
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def validated(zygote):
    @cache
    def run(overrides):
        with zygote.run([*COMMON, *overrides]) as job:
            assert job.wait(100) == 0, job.output
            lines = job.run.lines(job.run.metrics)
            return [(m["step"], m["val_loss"], m["val_samples"]) for m in lines if "val_loss" in m], job.output

    return run


@pytest.mark.parametrize("overrides", [*CASES, *(pytest.param(c, marks=slow) for c in MORE)], ids=" ".join)
def test_the_loss_has_the_bits_of_one_worker_for_any_shape_and_deaths(validated, overrides):
    alone, _ = validated(ALONE)
    assert [(step, samples) for step, _, samples in alone] == [(1, 32), (3, 32)]
    found, output = validated(overrides)
    assert found == alone
    assert output.count("(32 samples)") == 2


@slow
@pytest.mark.parametrize(
    "asked, samples", [("5", 6), *(pytest.param(*c, marks=slow) for c in (("1", 2), ("26", 26), ("1000000000", None)))]
)
def test_samples_are_rounded_up_to_micro_batches_without_duplicates(validated, asked, samples):
    overrides = ("parallel=2x2", f"run.validate_samples={asked}")
    settings = compose([*COMMON, *overrides])
    whole = Batches(settings).validations * settings.parallel.microbatch_size
    found, _ = validated(overrides)
    assert {samples for _, _, samples in found} == {samples or whole}


def test_the_number_may_still_be_given_as_micro_batches_per_pipeline():
    settings = compose(["parallel=3x4", "run.validate_microbatches=2"])
    validate(settings)
    assert settings.validation_microbatches == 6
    assert compose([]).validation_microbatches == 16
