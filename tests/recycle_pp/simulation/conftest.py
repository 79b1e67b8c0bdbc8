import pytest
from recycle_schedules import compiled


@pytest.fixture(scope="session", autouse=True)
def _the_planner_is_compiled():
    """Compiles the planner first. Without it, plans are worse for the first half minute."""
    compiled.load()
