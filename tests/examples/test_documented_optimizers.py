"""The optimizers of docs/optimizers.md, launched the way users launch them. A death changes no bit of the weights."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples"
COMMAND = [sys.executable, "-m", "recycle_pp.cli", "train"]
SETTINGS = ("model=tiny", "numerics=reproducible", "run.steps=8", "run.validate_every=0")
OPTIMIZERS = {
    "lion": ("optimizer.name=custom", "optimizer.build=lion:Lion", "optimizer.lr=3e-4"),
    "muon": ("optimizer=muon", "optimizer.lr=1e-3", "optimizer.moments=bf16"),
}


@pytest.mark.slow  # quick counterpart, without the launcher: tests/failures/test_optimizers.py
@pytest.mark.torchrun
@pytest.mark.timeout(600)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_continues_after_a_death_with_the_weights_of_a_single_worker(optimizer, tmp_path):
    def weights(name, *more):
        command = [*COMMAND, *SETTINGS, *OPTIMIZERS[optimizer], *more, f"run.dir={tmp_path / name}"]
        done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads((tmp_path / name / "summary.json").read_text())

    hit = weights("hit", "parallel=2x2", "parallel.microbatches=4", "+fail_at=4:1.1")
    alone = weights("alone", "parallel=1x1", "parallel.microbatches=8")
    assert (hit["deaths"], alone["deaths"]) == (1, 0)
    assert hit["weights_sha256"] == alone["weights_sha256"] is not None
