"""Fixtures and options of all tests."""

import gc
import os
import random
import signal
from pathlib import Path

import hypothesis
import pytest

from recycle_pp.testing.local_cluster import Zygote

# A background job of a shell script ignores SIGINT, and its children inherit that. Tests interrupt their processes.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# One thread per process, as in the Makefile. torch, which is imported later, reads this variable. With more threads the
# tests take several times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")

pytest_plugins = ["tests.failures.table", "tests.once", "tests.recorded", "tests.s3"]


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="also run the tests that take minutes (marked slow)")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--full"):
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]
    items.sort(key=lambda item: "in_the_interpreter" not in item.nodeid)  # the longest test starts first


def pytest_xdist_auto_num_workers(config):
    """Runs four tests at a time in separate processes, because the tested jobs mostly wait. Runs tests that are
    selected by name in this process, so that -s and --pdb work."""
    if any("::" in argument for argument in config.args) or config.option.keyword:
        config.option.dist = "no"
        return 0
    return 4


@pytest.fixture(scope="session")
def zygote():
    """Starts a whole job in a second, by forking: `with zygote.run(["parallel=2x2", ...]) as job: job.wait(60)`."""
    with Zygote() as process:
        yield process


@pytest.fixture(scope="session")
def zygote_of_transformers():
    """A zygote for jobs with Hugging Face models."""
    with Zygote(preload=Path(__file__).with_name("import_transformers.py")) as process:
        yield process


@pytest.fixture(scope="module", autouse=True)
def freeze_imported_modules():
    """Excludes the million objects of imported modules from garbage collection, which would take a second each time."""
    gc.collect()
    gc.freeze()


# No deadlines, because the duration of an example depends on the load of the machine.
hypothesis.settings.register_profile("quick", derandomize=True, deadline=None)
hypothesis.settings.register_profile("full", deadline=None)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    """Quick runs draw the same examples each time, so that failures come from code changes. --full draws new ones."""
    full = config.getoption("--full")
    hypothesis.settings.load_profile("full" if full else "quick")
    if full and config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(random.randrange(2**32))


def pytest_terminal_summary(terminalreporter, config):
    if config.getoption("--full"):
        seed = config.option.hypothesis_seed
        terminalreporter.write_line(
            f"hypothesis drew its examples with seed {seed}; to repeat them: --hypothesis-seed={seed}"
        )
