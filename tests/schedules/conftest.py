"""Fixtures of all planner tests: compiled loops, and the judge, an independent validator next to the repository."""

import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for random_problems and golden

from golden import SHARED
from recycle_schedules.compiled import load


@pytest.fixture(scope="session", autouse=True)
def machine_code():
    """Waits for the compiled loops. Without them plans differ, so results would depend on the load of the machine."""
    load()


@pytest.fixture(scope="session")
def judge():
    """The judge's module. Skips the test if the module is missing."""
    path = SHARED / "tools" / "validate_schedule.py"
    if not path.exists():
        pytest.skip("the judge is not next to the repository")
    spec = importlib.util.spec_from_file_location("judge", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
