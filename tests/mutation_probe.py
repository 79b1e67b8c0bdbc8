"""A pytest plugin and a probe. They record which tests reach a line in any process, and the outcome of each test.

`mutations.py` copies this file into a new folder, names the folder in MUTATIONS and PYTHONPATH, and runs pytest with
`-p mutation_probe`. Files in MUTATIONS:

    selected.json     {test: time limit in seconds}; only these tests run. Without the file all tests run.
    reached           one line per hit: number of the probe, phase, test
    reports           one line of JSON per report: test, phase, outcome, seconds

A process started by a test reads the test's name from a page of memory shared with pytest. An environment variable
would not work, because jobs are forked from a process that is older than the test.
"""

import json
import mmap
import os
from pathlib import Path

import pytest

FOLDER = Path(os.environ["MUTATIONS"])
SIZE = 4096


def _page():
    path = FOLDER / f"running-{os.environ.get('PYTEST_XDIST_WORKER', 'main')}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(descriptor, SIZE)
    try:
        return mmap.mmap(descriptor, SIZE)
    finally:
        os.close(descriptor)


page = None
seen = set()


def reached(number):
    """Records the running test. Returns True, so that the call can be inserted into a condition."""
    global page
    page = page or _page()
    turn = page[:8]
    if (number, turn) not in seen:
        seen.add((number, turn))
        _append("reached", f"{number}\t{page[8:].rstrip(bytes(1)).decode(errors='replace')}")
    return True


def _append(name, line):
    descriptor = os.open(FOLDER / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(descriptor, line.encode() + b"\n")
    finally:
        os.close(descriptor)


def _runs(phase, nodeid):
    global page
    page = page or _page()
    turn = int.from_bytes(page[:8], "little") + 1
    page[8:] = f"{phase}\t{nodeid}".encode()[: SIZE - 8].ljust(SIZE - 8, b"\0")
    page[:8] = turn.to_bytes(8, "little")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    _runs("setup", item.nodeid)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    _runs("call", item.nodeid)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item):
    _runs("teardown", item.nodeid)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Keeps the selected tests, in their order: fastest first."""
    path = FOLDER / "selected.json"
    if not path.exists():
        return
    selected = json.loads(path.read_text())
    order = {test: number for number, test in enumerate(selected)}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in order])
    items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])
    for item in items:
        item.add_marker(pytest.mark.timeout(selected[item.nodeid]), append=False)


class Reports:
    """Writes the reports. Registered only in the pytest process that receives the reports of all tests."""

    def pytest_runtest_logreport(self, report):
        line = {"test": report.nodeid, "phase": report.when, "outcome": report.outcome, "seconds": report.duration}
        _append("reports", json.dumps(line))


def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Reports())
