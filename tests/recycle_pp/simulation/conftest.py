import pytest
from recycle_schedules import compiled


@pytest.fixture(scope="session", autouse=True)
def _the_planner_is_compiled():
    """Compiles the planner first (about 30 s). Until then its plans are worse."""
    compiled.load()
