"""Printed steps count from 0, like those in files and flags, in a job started with torchrun."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent
SMALL = ["parallel.pipelines=2", "parallel.stages=1", "model=tiny", "run.dir=run", "run.validate_every=0",
         "run.standby=off"]  # fmt: skip


def printed(*command, cwd):
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=100, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.torchrun
def test_printed_steps_agree_with_those_of_the_fault_and_the_checkpoint(tmp_path):
    train = [BIN / "torchrun", "--nproc-per-node=2", "-m", "recycle_pp.train", *SMALL]
    first = printed(*train, "run.steps=12", "+fail_at=4:1.0", "checkpoint.every=6", cwd=tmp_path)
    steps = re.findall(r"^step +(\d+)  loss .*  (\d+) steps? left", first, re.MULTILINE)
    assert steps == [(str(step), str(11 - step)) for step in range(12)]
    assert first.index("\nstep  3  loss") < first.index("\nstep 4: worker 1.0 died")
    assert first.index("\nstep  5  loss") < first.index("checkpoint step-000006 saved")
    assert "\nafter step 11: checkpoint step-000012 saved\n" in first

    again = printed(*train, "run.steps=14", "run.resume=true", cwd=tmp_path)
    assert re.search(r"^continues with step 12, from .*/step-000012$", again, re.MULTILINE)
    assert "\nstep 12: 2 workers are ready; training begins\n" in again
    assert re.findall(r"^step +(\d+)  loss", again, re.MULTILINE) == ["12", "13"]

    status = printed(sys.executable, "-m", "recycle_pp.status", "run", cwd=tmp_path)
    assert "\nstep 13, 0 steps left, loss " in status
    report = printed(sys.executable, "-m", "recycle_pp.report", "run", cwd=tmp_path)
    assert " in step 0, " in report and " in step 13" in report and "\n  step 4: worker 1.0 died" in report
