"""Comparisons with other systems: figures computed from known commits and kills, and a short run of torchft.

The run needs the environment that bench/peers.py installs."""

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent / "bench"
TORCHFT = BENCH / "out" / "torchft"


@pytest.fixture
def peers(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    yield importlib.import_module("peers")
    for name in ("peers", "peer_jobs", "peer_worker"):
        sys.modules.pop(name, None)


def row(case, commits, kills=(), begin=0.0, end=10.0, job="torchft"):
    return {"job": job, "case": case, "commits": commits, "kills": kills, "begin": begin, "end": end, "load": 1.0}


def commit(at, samples=36):
    return at, round(at), samples, samples == 36


def kill(at, worker="1.2"):
    return {"time": at, "worker": worker}


def test_the_rate_counts_samples_between_begin_and_end(peers):
    assert peers.rate_of(row("free", [commit(at) for at in range(12)])) == pytest.approx(36.0)
    assert peers.rate_of(row("5", [commit(5, 24), commit(10)])) == pytest.approx(6.0)


def test_seconds_until_all_workers_take_part_again(peers):
    commits = [commit(1), commit(2), commit(3, 24), commit(4, 24), commit(5), commit(6), commit(7)]
    assert peers.full_again(row("one", commits, [kill(2.5), kill(6.5)])) == [2.5, 0.5]
    assert peers.full_again(row("one", commits[:4], [kill(2.5)])) == [], "not all workers took part again"
    assert peers.full_again(row("free", commits)) == []


def test_a_summary_compares_with_undisturbed_steps_of_the_same_run(peers):
    free = row("free", [commit(at) for at in range(11)])
    deaths = row("5", [commit(at) for at in (-2, -1, 0, 4, 5, 9, 10)], [kill(1), kill(6), kill(7, None)])
    table = peers.summary([free, deaths])
    assert [(line["case"], line["share"], line["deaths"], line["lost"]) for line in table] == [
        ("free", 1.0, 0, None),
        ("5", 0.4, 2, 3.0),
    ]
    assert table[1]["gap"] == 4.0
    peers.show(table)


def test_the_picture_has_all_cases(peers, tmp_path):
    commits = [commit(1), commit(2)]
    peers.picture(peers.summary([row("free", commits), row("5", commits)]), tmp_path / "new" / "peers.svg")
    text = (tmp_path / "new" / "peers.svg").read_text()
    assert "no death" in text and "a death every 5 s" in text and "torchft" in text


def test_no_death_is_recorded_if_no_worker_may_or_can_be_killed(peers):
    class Job:
        def __init__(self, victims):
            self._victims, self.pids = victims, {worker: 1 << 30 for worker in victims}  # ids that no process has

        def update(self):
            pass

        def victims(self):
            return self._victims

        def killed(self, worker):
            raise AssertionError("a worker without a process cannot be killed")

    assert peers.kill(Job([]), 11)["worker"] is None
    assert peers.kill(Job(["0.1"]), 11)["worker"] is None, "a worker whose process has ended cannot be killed"


def step(number, seconds, live=12):
    return {"step": number, "time": 100.0 + number, "step_seconds": seconds, "live_workers": live}


def event(name, number, at, **more):
    return {"event": name, "step": number, "time": at, "worker": "1.2", **more}


def test_lost_time_is_split_by_cause(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    lost_work = importlib.import_module("lost_work")
    seconds = {20: 0.9, 21: 0.8, 22: 0.7}
    live = {20: 11, 21: 11}
    steps = [step(number, seconds.get(number, 0.5), live.get(number, 12)) for number in range(10, 40)]
    known = {"stall_seconds": 0.1, "left_seconds": 0.32, "left_bound_seconds": 0.3}
    events = [event("death_detected", 20, 119.4), event("resumed", 20, 119.5, **known), event("rejoined", 22, 121.5)]
    problem = lost_work.initial_problem(lost_work.compose([*lost_work.COMMON, *lost_work.COMPUTE["sleep"]]))
    row = lost_work.lost(lost_work.Run(steps, events, problem))
    found = {name.strip(): round(row["parts"][name], 6) for name in ("broken", "  plan", "  stall", "away", "rejoin")}
    assert found == {"broken": 0.4, "plan": 0.02, "stall": 0.1, "away": 0.3, "rejoin": 0.2}
    assert row["parts"]["  bound"] == pytest.approx(0.1), (
        "0.3 s before the death + 0.3 s left - 0.5 s of a step without a death"
    )
    assert row["parts"]["  bound "] == pytest.approx(0.64 - 0.5), "the planner's bound without 1.2"
    assert row["parts"]["other"] == pytest.approx(0.0) and row["usual"] == 0.5
    lost_work.show(row)
    for name in ("lost_work", "recovery"):
        sys.modules.pop(name, None)


@pytest.mark.slow
@pytest.mark.skipif(not TORCHFT.exists(), reason="needs torchft, which `python bench/peers.py` installs in bench/out")
def test_torchft_recovers_from_deaths(tmp_path):
    bench = shutil.copytree(BENCH, tmp_path / "bench", ignore=shutil.ignore_patterns("out", "__pycache__"))
    options = ["--jobs", "torchft-warm", "--cases", "free", "one", "--seconds", "4", "--deaths", "1", "--slot", "0.01"]
    command = [sys.executable, bench / "peers.py", *options, "--environment", TORCHFT]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.splitlines()) == 3 and (bench / "out" / "peers.svg").exists()
