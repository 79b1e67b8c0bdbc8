"""Fixtures of the failure suite, and its closing table: how many cases of each kind, and the longest stall."""

from collections import defaultdict

import pytest

from .harness import Json, Runs

_results: dict[str, list[Json]] = defaultdict(list)  # kind of case -> what became of each


def pytest_collection_modifyitems(items):
    """Every case has a bound of its own; its fault-free run comes on top."""
    for item in items:
        if "runs" in getattr(item, "fixturenames", ()) and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def runs(zygote, tmp_path_factory):
    """Runs cases, and fault-free jobs to compare them with, each of those once."""
    return Runs(zygote, tmp_path_factory.mktemp("runs"), _results)


def pytest_sessionfinish(session):
    """In a process of several: what it has seen goes to the one that prints the table."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["failures"] = dict(_results)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    for kind, outcomes in getattr(node, "workeroutput", {}).get("failures", {}).items():
        _results[kind] += outcomes


def pytest_terminal_summary(terminalreporter):
    if not _results:
        return
    terminalreporter.section("failures survived")
    terminalreporter.write_line(f"{'cases':<24}{'jobs':>6}{'deaths':>8}{'longest stall':>16}{'longest job':>14}")
    for kind, outcomes in sorted(_results.items()):
        deaths = sum(outcome["deaths"] for outcome in outcomes)
        stall = max((s for outcome in outcomes for s in outcome["stalls"]), default=0.0)
        seconds = max(outcome["seconds"] for outcome in outcomes)
        terminalreporter.write_line(
            f"{kind:<24}{len(outcomes):>6}{deaths:>8}{1000 * stall:>13.0f} ms{seconds:>12.1f} s"
        )
