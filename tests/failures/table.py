"""The table at the end of the failure suite: for each kind of case, the number of jobs and the longest stall.

A pytest plugin (loaded by tests/conftest.py), so that it receives the results of all xdist processes.
"""

from collections import defaultdict
from typing import Any

import pytest

RESULTS: dict[str, list[dict[str, Any]]] = defaultdict(list)  # kind of case -> deaths, stalls and seconds of each case


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["failures"] = dict(RESULTS)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    for kind, outcomes in getattr(node, "workeroutput", {}).get("failures", {}).items():
        RESULTS[kind] += outcomes


def pytest_terminal_summary(terminalreporter):
    if not RESULTS:
        return
    terminalreporter.section("failures survived")
    terminalreporter.write_line(f"{'cases':<24}{'jobs':>6}{'deaths':>8}{'longest stall':>16}{'longest job':>14}")
    for kind, outcomes in sorted(RESULTS.items()):
        deaths = sum(outcome["deaths"] for outcome in outcomes)
        stall = max((s for outcome in outcomes for s in outcome["stalls"]), default=0.0)
        seconds = max(outcome["seconds"] for outcome in outcomes)
        terminalreporter.write_line(
            f"{kind:<24}{len(outcomes):>6}{deaths:>8}{1000 * stall:>13.0f} ms{seconds:>12.1f} s"
        )
