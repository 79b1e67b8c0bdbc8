"""Every script in bench/ runs from the command line at a small size, so that no code change breaks it unnoticed.

A new script needs a line in `SMALL`, or in `SLOW` if it takes more than about ten seconds. The figures of these runs
are meaningless. The scripts run in a temporary copy, so their output files go there.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

BENCH = Path(__file__).parent.parent / "bench"
TEXTS = {path.name: path.read_text() for path in BENCH.glob("*.py")}
SCRIPTS = {name for name, text in TEXTS.items() if "__main__" in text}
SMALL = [
    "coordinator.py --sizes 3x4x6 --deaths 1",
    "data.py tokens.bin --samples 1000 --sequence 16",
    "growth.py --sizes 3x4x6 4x4x6 --times 1",
    "health.py --scripted --looks 5",
    "loop.py --size 3x4x6 --gigabytes 0.01 --history 100",
    "plan_parts.py --times 1",
    "planner.py --golden golden --seconds 0",
    "split.py model.layers=6 parallel=1x2",
]
SLOW = [
    "alarms.py quiet --runs 1 --load 0",
    "curve.py --failures 2 --every 0.5 parallel=2x2 model=tiny",
    "chance.py --seeds 1 --steps 2 model.layers=2",
    "detection.py --deaths 2 --megabytes 10",
    "dry_run.py --sequence 64",
    "emulated.py --steps 2 --slot 0.01",
    "gpu.py --cpu --minutes 4 --out out/gpu.json",
    "gpu_job.py --cpu --steps 4 --shape 1x1",
    "gpu_links.py alone --cpu",
    "gpu_needs.py --cpu",
    "faultfree.py --steps 5 --rounds 1 model=small",
    "kernels.py --only norm rope swiglu optimizer",
    "islands.py --steps 24 --every 12 model=tiny",
    "islands_loss.py --steps 24 --every 12 --outer 12:0.7:0.9 model=tiny",
    "large.py --shapes 3x4 --op 0.02 --microbatches 2 --times 1",
    "links.py --rounds 1",
    "lost_work.py --launcher fork --mtbf 3 --seconds 12",
    "memory.py --pipelines 1 --copies 0 --steps 2",
    "models.py --layers 2 --width 32 --sequence 16 --vocabulary 256 --steps 1",
    "planner.py --ahead",
    "planner.py --links",
    "moves.py --steps 1 --slot 0.02 --moves 1",
    "precision.py --steps 3 model.layers=2",
    "peers.py --jobs recycle_pp restart-warm --cases free 2 --seconds 4 --slot 0.01",
    "recovery.py --launcher fork --deaths 1",
    "recovery.py --launcher fork --again --deaths 2",
    "regroup.py --workers 8 --times 1",
    "rejoin.py --gigabytes 0.01 --ops 4",
    "spot.py trace.csv --shape 2x2 --microbatches 2 --layers 4 --steps 4",
    "stage.py --layers 1",
    "sums.py --addends 2 --steps 1 model=small",
    "tokenise.py --gigabytes 0.02",
]


@pytest.mark.parametrize("command", [*SMALL, *(pytest.param(line, marks=pytest.mark.slow) for line in SLOW)])
def test_the_bench_runs(command, tmp_path):
    bench = shutil.copytree(BENCH, tmp_path / "bench", ignore=shutil.ignore_patterns("out", "__pycache__"))
    np.arange(2000, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    (tmp_path / "trace.csv").write_text("second,workers\n0,4\n40,3\n80,4\n200,4\n")
    problem = {"pipelines": 2, "stages": 2, "microbatches": 2}
    case = {"name": "a small one", "problem": problem, "best": 7, "proven_optimal": True}
    (tmp_path / "golden").mkdir()
    (tmp_path / "golden" / "cases.json").write_text(json.dumps([case]))
    script, *arguments = command.split()
    interpreted = os.environ | {"TRITON_INTERPRET": "1"}  # without a GPU
    done = subprocess.run(
        [sys.executable, bench / script, *arguments], cwd=tmp_path, env=interpreted, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    assert done.stdout.strip(), "the script printed no figures"


def test_every_script_has_a_test():
    assert {command.split()[0] for command in (*SMALL, *SLOW)} == SCRIPTS


def test_every_other_file_is_used_by_a_script():
    helpers = {name.removesuffix(".py") for name in TEXTS if name not in SCRIPTS}
    assert all(any(re.search(rf"\b{name}\b", TEXTS[script]) for script in SCRIPTS) for name in helpers)
