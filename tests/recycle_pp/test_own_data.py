"""A user's dataset in real jobs: any tensors reach the user's model, and deaths change no bit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from recycle_pp.telemetry.run_folder import RunFolder

pytestmark = pytest.mark.timeout(300)
EXAMPLES = Path(__file__).parents[2] / "examples"
DATA = "tests.recycle_pp.data.own_sets"
ALONE = ("parallel=1x1", "parallel.microbatches=12")
TWO = ("parallel=2x2", "parallel.microbatches=6")
PICTURES = ("model=custom", "model.layers=blocks", "model.sequence=1", "parallel.microbatch_size=4")
HERE = ("model.build=examples.own_data:Classifier", "data.build=examples.own_data:pictures")
COMMON = ("numerics=reproducible", "run.steps=6", "run.validate_every=3", "optimizer.lr=1e-2", "optimizer.warmup=0")
TOKENS = ("model=tiny", "model.sequence=16", f"data.build={DATA}:counted", "data.validation_share=0.2")


@pytest.fixture(scope="module")
def trained(zygote):
    """trained(overrides): (SHA-256 of the weights, losses, validation losses) of a job; equal jobs run once."""
    known = {}

    def run(*overrides, deaths=0):
        if overrides not in known:
            with zygote.run([*COMMON, *overrides]) as job:
                assert job.wait(250) == 0, job.output
                known[overrides] = result(job.run, deaths)
        return known[overrides]

    return run


def result(run, deaths):
    summary, lines = json.loads(run.summary.read_text()), run.lines(run.metrics)
    assert summary["deaths"] == deaths
    losses = [line["loss"] for line in lines]
    return summary["weights_sha256"], losses, [line["val_loss"] for line in lines if "val_loss" in line]


def test_a_death_changes_no_bit_of_a_model_for_pictures(trained):
    found = trained(*PICTURES, *HERE, *TWO, "+fail_at=[2:0.1@backward,4:1.0@forward]", "+rejoin_at=3:0.1", deaths=2)
    assert found == trained(*PICTURES, *HERE, *ALONE)
    weights, losses, held_out = found
    assert weights and losses[-1] < losses[0] and len(held_out) == 2


@pytest.mark.slow
def test_ignored_labels_of_a_dataset_have_the_same_weight_on_any_worker(trained):
    found = trained(*TOKENS, *TWO, "+fail_at=2:0.1@backward", deaths=1)
    assert found == trained(*TOKENS, *ALONE)


def test_a_model_argument_that_is_missing_in_the_data_is_reported_in_one_sentence(zygote):
    data = f"data.build={DATA}:mixed"
    with zygote.run([*COMMON, *PICTURES, HERE[0], data, *TWO, "data.validation_share=0.5"]) as job:
        assert job.wait(100) == 2, job.output
        assert "its forward takes pixel_values, but the data contain only" in job.output, job.output


@pytest.mark.slow
@pytest.mark.torchrun
def test_the_example_trains_through_a_death_as_launched(trained, tmp_path):
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    names = ("model.build=own_data:Classifier", "data.build=own_data:pictures")
    more = [*COMMON, *TWO, "+fail_at=2:1.1", f"run.dir={tmp_path}/run"]
    done = subprocess.run(
        [torchrun, "--nproc-per-node=4", "-m", "recycle_pp.train", *PICTURES, *names, *more], cwd=EXAMPLES,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert result(RunFolder(tmp_path / "run"), 1) == trained(*PICTURES, *HERE, *ALONE)
