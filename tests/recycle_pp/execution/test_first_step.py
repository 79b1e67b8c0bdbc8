"""The first step of a new worker, cold, as in its own process."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
STEP = """
import sys
import recycle_pp.execution.worker
from recycle_pp.data.batches import Batches
from tests.recycle_pp.in_process import backward, forward, pipeline, reduce_alone, small

settings = small()
stages, batches = pipeline(settings), Batches(settings)
before = set(sys.modules)
for g in range(2):
    forward(stages, batches, 0, g)
    backward(stages, g, split=g == 1)
reduce_alone(stages)
print(*sorted({name for name in set(sys.modules) - before if name.count(".") < 3}))
"""


def test_the_first_step_imports_nothing_while_others_wait():
    """torch imports sympy in its first backward: half a second in which all workers wait for one that has returned."""
    done = subprocess.run([sys.executable, "-c", STEP], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [], done.stdout
