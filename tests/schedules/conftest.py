"""What all planner tests share: compiled loops, and the judge, an independent validator beside the repository."""

import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for random_problems and golden

from golden import SHARED
from recycle_schedules.compiled import load


@pytest.fixture(scope="session", autouse=True)
def machine_code():
    """Until it is there plans are others: equal problems of a test would have different ones on a busy machine."""
    load()


@pytest.fixture(scope="session")
def judge():
    """The independent judge's module; skipped where it is not there."""
    path = SHARED / "tools" / "validate_schedule.py"
    if not path.exists():
        pytest.skip("the judge is not beside the repository")
    spec = importlib.util.spec_from_file_location("judge", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
