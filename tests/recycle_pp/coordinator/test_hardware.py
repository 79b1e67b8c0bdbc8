"""How a coordinator acts on hardware findings of supervisors."""

import json
from types import SimpleNamespace

import pytest
from recycle_schedules import Worker

from recycle_pp.config.settings import Parallel, Settings
from recycle_pp.coordinator.hardware import Hardware
from recycle_pp.wire.messages.health import Finding, Health, Reading

from .states import job_state

HEAT = Finding("GPU-1", "throttle", "slow", "throttled by heat", factor=1.6)
BROKEN = Finding("GPU-1", "xid", "kill", "XID 79")


@pytest.fixture
def of(tmp_path):
    state = job_state(Settings(parallel=Parallel(pipelines=2, stages=1)))
    for number in range(2):
        rank = state.roster.enter(number)
        rank.alive, rank.supervisor = True, SimpleNamespace(send=lambda message: None, hello=None)
    state.timers = SimpleNamespace(after=lambda seconds, function: function())
    state.run = SimpleNamespace(
        later=lambda function, *arguments: function(*arguments),
        write_json=lambda path, data: path.write_text(json.dumps(data)),
        health=tmp_path / "health.json",
        quarantine=tmp_path / "quarantine.json",
    )
    ended = []
    deaths = SimpleNamespace(end=lambda rank, cause, detail: ended.append((rank.number, cause, detail)))
    return SimpleNamespace(state=state, hardware=Hardware(state, deaths), ended=ended, run=state.run)


def report(of, number, *findings):
    of.hardware.reported(of.state.roster[number], Health([Reading("GPU-1", temperature=81.0)], list(findings)))


def test_a_finding_is_recorded_once_while_it_lasts(of):
    for findings in ([HEAT], [HEAT], [], []):
        report(of, 1, *findings)
    assert of.state.recorder.events == ["health_found", "health_over"]
    assert of.state.recorder.whole[0].worker == "1.0"


def test_a_worse_action_is_recorded_again(of):
    report(of, 0, Finding("GPU-1", "ecc", "note", "2 memory errors"))
    report(of, 0, Finding("GPU-1", "ecc", "drain", "2 memory errors"))
    assert [event.action for event in of.state.recorder.whole] == ["note", "drain"]


def test_a_throttled_worker_gets_less_work_until_it_recovers(of):
    report(of, 1, HEAT)
    report(of, 0)
    assert of.state.profile.slow == {Worker(1, 0): 1.6}
    report(of, 1)
    assert of.state.profile.slow == {}


def test_the_worker_of_a_broken_gpu_is_killed_and_the_gpu_goes_into_quarantine(of):
    report(of, 1, BROKEN)
    assert of.ended == [(1, "quarantine", "GPU-1: XID 79")]
    entry = json.loads(of.run.quarantine.read_text())["GPU-1"]
    assert (entry["worker"], entry["detail"]) == ("1.0", "XID 79")
    assert of.hardware.quarantined == {"GPU-1": "XID 79"}
    of.run.quarantine.unlink()
    report(of, 0)
    assert of.hardware.quarantined == {}, "an operator has lifted the quarantine"


def test_a_gpu_that_was_in_quarantine_keeps_its_entry(of):
    of.run.quarantine.write_text('{"GPU-1": {"worker": "0.0", "host": "a", "detail": "old", "time": 1, "step": 2}}')
    assert Hardware(of.state, None).quarantined == {"GPU-1": "old"}
    report(of, 1, Finding("GPU-1", "quarantine", "kill", "in quarantine.json: old"))
    report(of, 0, BROKEN)
    assert json.loads(of.run.quarantine.read_text())["GPU-1"]["detail"] == "old"
    assert len(of.ended) == 2


def test_health_json_has_the_newest_figures_of_all_devices(of):
    report(of, 1)
    report(of, 0)
    devices = json.loads(of.run.health.read_text())["devices"]
    assert [(device["worker"], device["temperature"]) for device in devices] == [("0.0", 81.0), ("1.0", 81.0)]


def test_health_json_has_no_figures_of_a_lost_node(of):
    report(of, 0)
    report(of, 1)
    of.state.roster[1].supervisor = None
    report(of, 0)
    assert [device["worker"] for device in json.loads(of.run.health.read_text())["devices"]] == ["0.0"]
