"""The total size of all objects in the coordinator's process and in a worker does not grow with steps or deaths."""

import json
import os
import signal
from contextlib import suppress
from itertools import pairwise

import pytest

from recycle_pp.telemetry.follower import Follower

from .harness import Case

AT_ONCE = ("emulate=sleep", "schedule.profile_steps=0", *(f"emulate.{op}=0" for op in "FIWO"))
STEPS = 2_000  # tolerance in bytes; a list with one entry per step would grow by 2,400 bytes in 300 steps
DEATHS = 40_000  # bytes that may be kept about the newest deaths
A_DEATH = 100  # bytes that may be kept per death, because summary.json contains the stall of each


def sizes(path):
    """{(process, step or generation): bytes}."""
    return {(who, step): size for who, step, size in map(json.loads, path.read_text().splitlines())}


@pytest.mark.parametrize(
    "at",
    [
        pytest.param((200, 500, 800), marks=pytest.mark.slow),
        pytest.param((2000, 6000, 10_000), marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
    ],
)
def test_nothing_grows_with_the_steps(at, sabotaged, tmp_path):
    census = {"census": str(tmp_path / "sizes"), "steps": at}
    case = Case(
        "many steps", "2x2", (*AT_ONCE, "parallel.microbatches=1"), steps=at[-1] + 1, deaths=0, bound=60 + 0.1 * at[-1]
    )
    sabotaged.of(case, "growth", environment={"RECYCLE_SABOTAGE": json.dumps(census)})
    found = sizes(tmp_path / "sizes")
    for who in ("coordinator", "worker"):
        growth = [found[who, late] - found[who, early] for early, late in pairwise(at)]
        assert min(growth) < STEPS, (who, growth)


@pytest.mark.parametrize(
    ("early", "late"), [(4, 12), pytest.param(20, 200, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def test_nothing_grows_with_the_deaths(early, late, sabotaged, tmp_path):
    """Worker 1.1 dies as soon as it has returned. Each death and each return starts a new generation."""
    generations = [2 * early, 2 * late]
    census = {"census": str(tmp_path / "sizes"), "generations": generations}

    def kill(job):
        events, deaths = Follower(job.run.events), 0
        pid = None
        while deaths < late + 2:
            for event in events.new():
                if event["event"] == "spawned" and event["worker"] == "1.1":
                    pid = event["pid"]
                if event["event"] == "started" or (event["event"] == "rejoined" and event["worker"] == "1.1"):
                    os.kill(pid, signal.SIGKILL)
                    deaths += 1
            with suppress(TimeoutError):
                return job.wait(0.01)  # the job has ended too early
        return job.signal(signal.SIGINT)

    slow = ("emulate=sleep", "run.respawns=100000", *(f"emulate.{op}=0.01" for op in "FIWO"))
    bound = 60 + 10.0 * late
    case = Case("many deaths", "2x2", slow, steps=100_000, deaths=None, bound=bound, ends="SIGINT")
    environment = {"RECYCLE_SABOTAGE": json.dumps(census)}
    outcome = sabotaged.of(case, "growth", environment=environment, meanwhile=kill)
    assert outcome.deaths >= late
    found = sizes(tmp_path / "sizes")
    growth = {who: found[who, generations[1]] - found[who, generations[0]] for who in ("coordinator", "worker")}
    assert max(growth.values()) < DEATHS + A_DEATH * (late - early), growth
