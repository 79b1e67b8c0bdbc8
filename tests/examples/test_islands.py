"""The examples of islands, as users launch them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from recycle_pp.config.compose import compose

EXAMPLES = Path(__file__).parents[2] / "examples"
ENVIRONMENT = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
@pytest.mark.torchrun
@pytest.mark.timeout(400)
def test_two_islands_on_one_machine_meet_in_a_folder(tmp_path):
    command = ["sh", EXAMPLES / "islands.sh", tmp_path]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=360, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    listed = [sys.executable, "-m", "recycle_pp.islands", tmp_path / "store", "--json"]
    rounds = json.loads(subprocess.run(listed, capture_output=True, text=True, timeout=60, check=True).stdout)["rounds"]
    assert len(rounds) >= 2  # a round takes more steps on a busy machine, because nobody waits for it
    for each in rounds:
        assert each["islands"] == ["frankfurt", "oregon"] and len({*each["theta_sha256"].values()}) == 1, each
    shown = [sys.executable, "-m", "recycle_pp.status", tmp_path / "oregon"]
    assert "of frankfurt, oregon: norm " in subprocess.run(shown, capture_output=True, text=True, check=False).stdout


def test_an_island_is_submitted_to_slurm_with_valid_settings(tmp_path):
    sbatch = tmp_path / "sbatch"
    sbatch.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    sbatch.chmod(0o755)
    environment = ENVIRONMENT | {"PATH": f"{tmp_path}:{ENVIRONMENT['PATH']}"}
    command = ["sh", EXAMPLES / "islands_slurm.sh", "oregon", "s3://bucket/run", "parallel=4x8", "model=llama8b"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    job, script, *settings = done.stdout.splitlines()
    assert (job, script) == ("--job-name=island-oregon", "examples/slurm.sh")
    composed = compose(settings)
    assert (composed.islands.name, composed.islands.store) == ("oregon", "s3://bucket/run")
    assert composed.checkpoint.store == "s3://bucket/run/checkpoints/oregon"
    assert composed.parallel.pipelines == 4
