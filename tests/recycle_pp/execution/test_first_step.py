"""The first step of a new worker, cold, as in its own process."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
STEP = """
import sys
import recycle_pp.execution.worker
from tests.recycle_pp.in_process import small, train

before = set(sys.modules)
train(small(), steps=1)
print(*sorted(name for name in set(sys.modules) - before if not name.startswith("recycle_pp.")))
"""


def test_the_first_step_imports_no_library_while_others_wait():
    """torch imports sympy in its first backward. All workers would wait half a second for one that has returned."""
    done = subprocess.run([sys.executable, "-c", STEP], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [], done.stdout
