"""Jobs on simulated GPUs that fail at a scripted step: the effect of each failure on the GPU's worker."""

import json

import pytest

from recycle_pp.health.__main__ import main

from .launched import Launched

# Six workers with one GPU each; rank 2 * d + s runs W(d, s). GPUs are sampled every 0.1 s instead of every 10 s, so all
# periods are a hundredth: a minute becomes 0.6 s.
SHAPE = ("parallel=3x2", "model=tiny", "emulate=sleep", "control.health=0.1", "run.standby=off", "run.respawns=100")
FAST = tuple(f"emulate.{kind}=0.004" for kind in "FIWO")


def scripted(folder, timeline):
    """Environment variables for a job in `folder` whose GPUs follow the timeline."""
    script = {"devices": 6, "metrics": str(folder / "run/metrics.jsonl"), "timeline": timeline}
    (folder / "script.json").write_text(json.dumps(script))
    return {
        "RECYCLE_NVML": "recycle_pp.testing.scripted_nvml",
        "RECYCLE_NVML_SCRIPT": str(folder / "script.json"),
    }


@pytest.fixture
def start(zygote, tmp_path):
    def start(timeline, *overrides):
        arguments = [*SHAPE, *FAST, f"run.dir={tmp_path / 'run'}", *overrides]
        return zygote.run(arguments, scripted(tmp_path, timeline))

    return start


def uuid(rank):
    return f"GPU-{rank:08d}"


def events(job, *names):
    return [event for event in job.run.lines(job.run.events) if event["event"] in names]


def findings(job):
    """(worker, signal, action) of the findings, except those about NVML itself, which may occur in every run: on a busy
    machine a sample may take longer than 0.6 s, which is such a finding."""
    found = events(job, "health_found")
    return [(e["worker"], e["signal"], e["action"]) for e in found if e["signal"] != "nvml"]


def committed(job):
    return [line["step"] for line in job.run.lines(job.run.metrics)]


def test_the_worker_of_a_gpu_off_the_bus_is_killed_and_the_gpu_goes_into_quarantine(start):
    steps = ("run.steps=60", "checkpoint.every=0")
    with start([{"step": 20, "device": 3, "xid": 79}], *steps) as job:
        assert job.wait(120) == 0, job.output
        assert findings(job) == [("1.1", "xid", "kill")]
        (found,) = [event for event in events(job, "health_found") if event["signal"] == "xid"]
        assert found["device"] == uuid(3) and "GPU has fallen off the bus; NVIDIA: RESTART_BM" in found["detail"]
        (death,) = events(job, "death_detected")
        assert (death["worker"], death["cause"]) == ("1.1", "quarantine") and 20 <= death["step"] <= 25
        assert not events(job, "respawned", "given_up") and committed(job) == list(range(60))
        assert list(json.loads(job.run.quarantine.read_text())) == [uuid(3)]


@pytest.mark.slow
def test_the_worker_of_a_lost_gpu_is_killed_at_once(start):
    with start([{"step": 10, "device": 4, "lost": True}], "run.steps=40") as job:
        assert job.wait(120) == 0, job.output
        (death,) = events(job, "death_detected")
        assert (death["worker"], death["cause"]) == ("2.0", "quarantine") and 10 <= death["step"] <= 15
        assert not events(job, "respawned") and committed(job) == list(range(40))


def test_a_worker_whose_gpu_has_memory_errors_leaves_after_a_commit(start):
    with start([{"step": 10, "device": 1, "uncorrected": 2}], "run.steps=40") as job:
        assert job.wait(120) == 0, job.output
        assert findings(job) == [("0.1", "ecc", "note"), ("0.1", "ecc", "drain")]
        assert [e["worker"] for e in events(job, "evicted")] == [e["worker"] for e in events(job, "left")] == ["0.1"]
        assert {e["cause"] for e in events(job, "death_detected")} <= {"eviction"}
        assert not events(job, "resumed", "respawned"), "no work may be lost, and no worker may be restarted"
        assert not job.run.quarantine.exists() and committed(job) == list(range(40))


def test_a_worker_with_a_hot_gpu_gets_less_work_until_it_has_cooled(start):
    heat = {"step": 20, "device": 0, "throttle": "HwThermalSlowdown", "clock": 990, "temperature": 91}
    cool = {"step": 50, "device": 0, "throttle": "", "clock": 1980, "temperature": 60}
    with start([heat, cool], "run.steps=90") as job:
        assert job.wait(120) == 0, job.output
        begun = {e["signal"]: e for e in events(job, "health_found")}
        assert begun["throttle"]["action"] == "slow" and begun["throttle"]["factor"] == 2.0
        assert {e["signal"] for e in events(job, "health_over")} - {"nvml"} == {"throttle", "temperature"}
        assert not events(job, "death_detected", "slow")
        slow = [event["problem"]["speed"] for event in plans(job)]
        assert slow == [{"0,0": 0.5}, {}], slow


@pytest.mark.slow
@pytest.mark.torchrun
def test_one_job_under_torchrun_survives_all_of_these_failures(tmp_path, monkeypatch):
    timeline = [
        {"step": 10, "device": 0, "hangs": 600},
        {"step": 20, "device": 3, "xid": 79},
        {"step": 40, "device": 4, "uncorrected": 1},
        {"step": 60, "device": 1, "throttle": "HwThermalSlowdown", "clock": 990},
        {"step": 90, "device": 1, "throttle": "", "clock": 1980},
    ]
    for name, value in scripted(tmp_path, timeline).items():
        monkeypatch.setenv(name, value)
    arguments = [*SHAPE[2:], *FAST, "parallel.pipelines=3", "parallel.stages=2", "run.steps=150"]
    with Launched(tmp_path, nodes=1, workers=6, arguments=arguments) as job:
        assert job.wait([0], 250) == [0], job.explain()
        assert [line["step"] for line in job.metrics()] == list(range(150))
        assert ("0.0", "nvml", "note") in [(e["worker"], e["signal"], e["action"]) for e in job.events("health_found")]
        assert sorted(findings(job)) == [
            ("0.1", "throttle", "slow"), ("1.1", "xid", "kill"), ("2.0", "ecc", "drain"), ("2.0", "ecc", "note"),
        ], job.explain()  # fmt: skip
        causes = [(e["worker"], e["cause"]) for e in job.events("death_detected")]
        assert causes[0] == ("1.1", "quarantine") and {*causes[1:]} <= {("2.0", "eviction")}
        assert [e["worker"] for e in job.events("left")] == ["2.0"]
        assert ("0.1", "throttle") in [(e["worker"], e["signal"]) for e in job.events("health_over")]


def plans(job):
    """The events that change the speeds in the planner's problem."""
    changed, newest = [], {}
    for line in job.run.lines(job.run.protocol):
        problem = (line.get("event") or {}).get("problem")
        if problem and problem.get("speed", {}) != newest:
            newest = problem.get("speed", {})
            changed.append(line["event"])
    return changed


def test_a_driver_library_that_hangs_costs_no_worker_and_no_step(start):
    with start([{"step": 5, "device": 2, "hangs": 600}], "run.steps=60") as job:
        assert job.wait(120) == 0, job.output
        found = [(e["worker"], e["signal"], e["action"]) for e in events(job, "health_found")]
        assert ("1.0", "nvml", "note") in found and findings(job) == []
        assert not events(job, "death_detected", "slow") and committed(job) == list(range(60))


def test_no_worker_starts_on_a_gpu_in_quarantine(start, tmp_path, capsys):
    broken = {uuid(5): {"worker": "2.1", "host": "here", "detail": "XID 79", "time": 1.0, "step": 3}}
    (tmp_path / "run").mkdir()
    (tmp_path / "run/quarantine.json").write_text(json.dumps(broken))
    with start([], "run.steps=10") as job:
        assert job.wait(120) == 0, job.output
        assert [(e["worker"], e["cause"]) for e in events(job, "death_detected")] == [("2.1", "quarantine")]
        assert committed(job) == list(range(10))
    assert main(["--clear", uuid(5), str(job.run.path)]) == 0
    assert json.loads(job.run.quarantine.read_text()) == {}
    assert main(["--clear", uuid(5), str(job.run.path)]) == 2
    assert "is not in" in capsys.readouterr().err
