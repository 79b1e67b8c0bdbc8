"""`python -m recycle_pp.status`: whether a run is alive."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time

import msgspec
import pytest

from recycle_pp import doctor
from recycle_pp.config.loading import load
from recycle_pp.linux.processes import process_stat
from recycle_pp.status import main
from recycle_pp.telemetry import heartbeat
from recycle_pp.telemetry.events.health import HealthFound, HealthOver
from recycle_pp.telemetry.evidence import gather
from recycle_pp.telemetry.heartbeat import Heartbeat, Pulse, Sign
from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.telemetry.status import StatusReader, worker_map

LONG = ["parallel=2x2", "model=tiny", "run.steps=100000", "run.validate_every=0", "emulate=sleep"]


def status(run, capsys) -> dict:
    main([str(run.path), "--json"])
    return json.loads(capsys.readouterr().out)


def test_status_shows_a_job_running_then_without_a_worker_then_dead(zygote, capsys):
    with zygote.run([*LONG, "+fail_at=3:1.1"]) as job:
        job.wait_for_event("resumed", 60)
        deadline = time.monotonic() + 30
        while True:  # the heartbeat lists the live workers once a second
            seen = status(job.run, capsys)
            if (seen["state"], len(seen["live"])) == ("running", 3) or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        assert seen["state"] == "running" and seen["live"] == ["0.0", "0.1", "1.0"], seen
        assert seen["step"] >= 2 and seen["eta_seconds"] > 0 and seen["deaths"] == 1 and seen["stalls"] == 1
        assert seen["last_deaths"][0]["worker"] == "1.1" and "SIGKILL" in seen["last_deaths"][0]["cause"]
        assert main([str(job.run.path)]) == 0
        shown = capsys.readouterr().out
        assert "running (the coordinator, process" in shown and "pipeline 1 ■ ·" in shown
        for pid in job.supervisors():
            os.kill(pid, signal.SIGKILL)
        job.wait(60)
        seen = status(job.run, capsys)
        assert seen["state"] == "dead" and "has ended" in seen["proof"] and seen["eta_seconds"] is None
        assert main([str(job.run.path)]) == 1


STRIKES = {
    "killed": ("started", 0.5, signal.SIGKILL),
    "killed in step 0": ("started", 0.0, signal.SIGKILL),
    "killed before the start": ("spawned", 0.0, signal.SIGKILL),
    "drained": ("started", 0.5, signal.SIGTERM),
    "hung": ("started", 0.5, signal.SIGSTOP),
}


@pytest.mark.parametrize(
    "how", [how if how in ("killed", "drained") else pytest.param(how, marks=pytest.mark.slow) for how in STRIKES]
)
def test_a_death_is_written_before_its_effects_and_status_sees_the_job_continue(how, zygote, capsys):
    event, after, number = STRIKES[how]
    with zygote.run([*LONG, "control.suspicion=3", "run.respawns=0"]) as job:
        job.wait_for_event(event, 60)
        deadline, pids = time.monotonic() + 60, {}
        while "1.1" not in pids:
            pids = {e["worker"]: e["pid"] for e in job.run.lines(job.run.events) if e["event"] == "spawned"}
            assert time.monotonic() < deadline, job.output
        time.sleep(after)
        os.kill(pids["1.1"], number)
        job.wait_for_event("death_detected", 60)
        (death,) = (e for e in job.run.lines(job.run.events) if e["event"] == "death_detected")
        while (seen := status(job.run, capsys))["recovering"] or (seen["step"] or 0) < death["step"] + 1:
            assert time.monotonic() < deadline, (seen, job.output)
            time.sleep(0.05)
        events, shown = job.run.lines(job.run.events), job.output.splitlines()
    names = [event["event"] for event in events]
    assert [event["time"] for event in events] == sorted(event["time"] for event in events)
    announced = next(n for n, line in enumerate(shown) if "worker 1.1 died" in line or "worker 1.1 has ended" in line)
    if number == signal.SIGTERM:
        assert names.index("evicted") < names.index("left") < names.index("death_detected")
    elif how == "killed before the start":
        assert names.index("death_detected") < names.index("started")
    else:
        assert names.index("death_detected") < names.index("resumed")
        assert announced < next(n for n, line in enumerate(shown) if "a stall of" in line), shown
        assert announced < next(n for n, line in enumerate(shown) if "3 of 4 workers" in line), shown


def test_status_shows_how_a_run_has_ended(recorded, zygote, capsys):
    assert main([recorded.path, "--watch"]) == 0
    assert "finished (the coordinator ended with exit code 0)" in capsys.readouterr().out
    with zygote.run(LONG) as job:
        job.wait_for_event("started", 60)
        job.signal(signal.SIGINT)
        job.wait(60)
        assert main([str(job.run.path)]) == 1
        assert "stopped (the coordinator ended with exit code 130)" in capsys.readouterr().out


def test_status_is_recovering_from_the_first_effect_of_a_death_to_its_last(run):
    """This also holds with deaths of joiners, drains, a second death, a restore and a new coordinator in between."""
    reader, time_ = StatusReader(run), time.time()

    def recovering(name, step, worker=None, **fields):
        wrote_event(run, name, step, worker=worker, time=time_, **fields)
        return reader.read().recovering

    def commits(step):
        line = {"step": step, "loss": 1.0, "tokens_per_second": 1.0, "step_seconds": 1.0}
        with run.metrics.open("a") as file:
            file.write(json.dumps(line) + "\n")
        return reader.read().recovering

    cause = {"cause": "signal", "detail": "SIGKILL", "injected": False}
    resumed = {"stall_seconds": 0.1, "dead": ["1.1"]}
    assert not recovering("started", 0)
    assert recovering("death_detected", 0, "1.1", **cause) and recovering("plan_adopted", 0)
    assert not recovering("resumed", 0, **resumed)
    assert not recovering("death_detected", 0, "1.1", **cause), "the dead process had not taken part yet"
    assert not recovering("rejoined", 1, "1.1") and not commits(1)
    assert recovering("death_detected", 2, "1.1", **cause) and recovering("death_detected", 2, "0.1", **cause)
    assert not commits(2), "the step is committed, so the job has continued"
    assert not recovering("left", 3, "0.0") and not recovering("death_detected", 3, "0.0", **cause)
    assert recovering("stage_lost", 3, stage=0) and recovering("restored", 2, checkpoint=2)
    assert not recovering("plan_adopted", 2)
    assert recovering("coordinator_lost", 4, rank=0) and not recovering("resumed", 4, **resumed)


def test_status_shows_the_steps_since_a_restore_and_each_step_once(run):
    def commits(*steps):
        with run.metrics.open("a") as file:
            file.writelines(json.dumps({"step": step, "step_seconds": 1.0}) + "\n" for step in steps)

    watching = StatusReader(run)
    commits(0, 1, 2, 3)
    assert watching.read().step == 3
    wrote_event(run, "restored", 2, time=time.time(), checkpoint=2)
    assert watching.read().step == 1
    commits(2, 3, 4)
    assert watching.read().step == 4 and StatusReader(run).read().step == 4
    commits(3)
    assert watching.read().step == 3 and StatusReader(run).read().step == 3


def wrote_event(run, name, step, **fields):
    event = {"time": time.time(), "event": name, "step": step, "generation": 0, "worker": None} | fields
    with run.events.open("a") as file:
        file.write(json.dumps(event) + "\n")


def test_status_names_the_file_that_the_job_waits_for_until_the_next_commit(run, capsys):
    def shown():
        main([str(run.path)])
        return capsys.readouterr().out

    silent = {"path": "/data/train.bin", "waiting": ["0.0", "1.0"], "seconds": 10.0}
    wrote_event(run, "waits_for_data", 5, **silent, time=time.time() - 3)
    Heartbeat(run, lambda: 0, "127.0.0.1:1").write([])
    sentence = "the disk of /data/train.bin has not answered for 13 s; workers 0.0, 1.0 read it"
    assert sentence in shown()
    run.metrics.write_text('{"step": 4}\n')
    assert sentence in shown(), "the job waits in step 5"
    run.metrics.write_text('{"step": 4}\n{"step": 5}\n')
    assert "/data/train.bin" not in shown()
    wrote_event(run, "waits_for_data", 6, **silent, time=time.time() - 25)
    assert "/data/train.bin" not in shown(), "the job would have repeated the event every 10 s"


MOVE = {
    "before": [8, 8, 8, 8], "layout": [9, 9, 5, 9], "step_seconds": 0.6, "new_step_seconds": 0.5, "gain_seconds": 99.0,
    "cost_seconds": 0.1, "bytes": 7_000_000,
}  # fmt: skip


def test_status_shows_the_layout_that_layers_move_to_and_then_the_new_layout(run, capsys):
    def shown():
        main([str(run.path)])
        return [line for line in capsys.readouterr().out.splitlines()[1:] if "layers" in line]

    assert shown() == []
    begun = MOVE | {"outage_seconds": 900.0, "receivers": ["0.0"]}
    wrote_event(run, "rebalancing", 5, **begun, time=time.time() - 3)
    Heartbeat(run, lambda: 0, "127.0.0.1:1").write([])
    assert shown() == ["layers have been moving to 9 9 5 9 for 0:03"]
    wrote_event(run, "rebalanced", 6, **MOVE, first_step=5, seconds=3.0, stall_seconds=0.02)
    assert shown() == ["decoder layers by stage, after moves: 9 9 5 9"]
    wrote_event(run, "rebalancing", 8, **begun | {"layout": [8, 8, 8, 8]})
    assert len(shown()) == 2
    wrote_event(run, "rebalancing_abandoned", 8, layout=[9, 9, 5, 9], detail="a receiver died")
    assert shown() == ["decoder layers by stage, after moves: 9 9 5 9"]
    wrote_event(run, "rebalancing", 9, **begun)
    wrote_event(run, "coordinator_lost", 9, rank=0)
    assert shown() == ["decoder layers by stage, after moves: 9 9 5 9"], "the next coordinator abandons the move"
    wrote_event(run, "restored", 4, checkpoint=4)
    assert shown() == [], "the workers start with the first layout"


@pytest.mark.parametrize(
    ("event", "fields", "sentence"),
    [
        ("checkpoint_failed", {"detail": "No space left"}, "checkpoint step-000020 was not saved: No space left"),
        ("checkpoint_skipped", {"by": "worker 0.1"}, "worker 0.1 had not finished the previous checkpoint, so"),
    ],
)
def test_status_shows_how_long_no_checkpoint_was_saved(event, fields, sentence, run, capsys):
    def shown():
        main([str(run.path)])
        return capsys.readouterr().out

    wrote_event(run, "checkpoint_saved", 10, checkpoint=10)
    assert "step-0000" not in shown()
    newest = {"newest": 10, "unsaved_seconds": 30.0}
    wrote_event(run, event, 20, checkpoint=20, **newest, **fields, time=time.time() - 60)
    Heartbeat(run, lambda: 0, "127.0.0.1:1").write([])
    assert sentence in shown() and "; the newest is step-000010, saved 90 s ago" in shown()
    wrote_event(run, "checkpoint_saved", 30, checkpoint=30)
    assert "step-0000" not in shown()


def test_status_shows_how_long_no_checkpoint_was_stored(run, capsys):
    def shown():
        main([str(run.path)])
        return capsys.readouterr().out

    failed = {"detail": "refused", "newest": 10, "unsaved_seconds": 30.0, "time": time.time() - 60}
    wrote_event(run, "checkpoint_not_stored", 20, checkpoint=20, **failed)
    wrote_event(run, "checkpoint_saved", 30, checkpoint=30)
    Heartbeat(run, lambda: 0, "127.0.0.1:1").write([])
    assert "checkpoint step-000020 is not in the store: refused; the newest there is step-000010, stored 90 s ago" in (
        shown()
    )
    wrote_event(run, "checkpoint_stored", 30, checkpoint=30)
    assert "step-0000" not in shown()


@pytest.fixture
def run(tmp_path):
    run = RunFolder.create(load({"run": {"dir": str(tmp_path / "run")}}))
    Heartbeat(run, lambda: 0, "127.0.0.1:1").write([])
    return run


def wrote(run, **changes) -> None:
    sign = Sign.read(run)
    run.write_json(run.heartbeat, msgspec.to_builtins(msgspec.structs.replace(sign, **changes)))


def test_a_reused_process_id_does_not_prove_life(run, capsys):
    assert status(run, capsys)["state"] == "starting"
    wrote(run, started=1)  # the same id, another process
    assert status(run, capsys)["state"] == "dead"


@pytest.mark.parametrize("error", [None, PermissionError], ids=["hidepid=2", "hidepid=1"])
def test_a_job_of_another_user_whose_processes_proc_hides_is_watched(run, capsys, monkeypatch, error):
    def stat(pid):
        if error:
            raise error

    def kill(pid, number):
        raise PermissionError if pid == os.getppid() else ProcessLookupError

    monkeypatch.setattr(heartbeat, "SILENT_SECONDS", 0.2)
    monkeypatch.setattr(heartbeat, "process_stat", stat)
    monkeypatch.setattr(os, "kill", kill)
    assert status(run, capsys)["state"] == "dead"
    wrote(run, pid=os.getppid())
    assert status(run, capsys)["state"] == "silent"
    pulse, beats = Pulse(run), iter(range(1, 9))
    monkeypatch.setattr(heartbeat.time, "sleep", lambda _: wrote(run, time=time.time() + next(beats)))
    assert pulse.look().verdict == "alive"


def test_a_follower_ends_with_the_job_but_not_before_the_next_coordinator_can_continue_it(run):
    assert not Pulse(run).ended()
    wrote(run, started=1)
    assert not Pulse(run).ended(), "the coordinator has just ended"
    wrote(run, time=time.time() - 60)
    assert Pulse(run).ended()
    wrote(run, time=time.time(), over=True, code=130)
    assert Pulse(run).ended()
    run.heartbeat.unlink()
    assert not Pulse(run).ended()


def test_if_another_node_can_take_over_a_job_without_a_coordinator_counts_as_running_until_then(run, monkeypatch):
    def takes_over():
        time.sleep(0.5)
        Heartbeat(run, lambda: 1, "127.0.0.1:2").write([], 20.0)

    pulse = Pulse(run)
    assert pulse.look().verdict == "alive"
    wrote(run, started=1, patience=20.0)
    successor = threading.Thread(target=takes_over)
    successor.start()
    assert pulse.look().proof.endswith("has ended, and another node may take over")
    with pytest.raises(ValueError, match="belongs to a job that still runs"):
        heartbeat.refuse_running(run)
    successor.join()
    assert heartbeat.address_of(run) == "127.0.0.1:2"
    monkeypatch.setattr(heartbeat, "SILENT_SECONDS", 0.1)
    wrote(run, started=1, patience=1.0)
    assert status_after(run, "gone") > 0.5


def test_the_silence_of_a_coordinator_on_another_machine_lasts_until_no_node_can_take_over(run, monkeypatch):
    monkeypatch.setattr(heartbeat, "SILENT_SECONDS", 0.1)
    wrote(run, boot="another", patience=1.0)
    assert status_after(run, "silent") > 0.9


def test_doctor_waits_for_the_silence_of_a_coordinator_and_does_not_blame_the_disk(run, monkeypatch):
    wrote(run, boot="another", patience=1.0)
    monkeypatch.setattr(heartbeat, "SILENT_SECONDS", 0.1)
    assert doctor.of_run(str(run.path), seconds=0.7).verdict != "storage"


def status_after(run, verdict: str) -> float:
    """Seconds that a look takes. Asserts its verdict."""
    begin = time.monotonic()
    assert Pulse(run).look().verdict == verdict
    return time.monotonic() - begin


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(heartbeat, "SILENT_SECONDS", 1.0)


@pytest.fixture(params=[{"boot": "another"}, {"namespace": "another"}], ids=["machine", "container"])
def elsewhere(request, run):
    """wrote(time) writes a heartbeat of a coordinator on another machine or in another container."""
    return lambda time: wrote(run, pid=2**22, started=1, time=time, **request.param)


def test_the_doctor_does_not_count_rolled_back_steps_in_the_usual_duration_of_a_step(run):
    lines = [{"step": step, "step_seconds": 1.0 if step < 10 else 9.0} for step in range(20)]
    with run.metrics.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in [*lines, {"step": 10, "step_seconds": 1.0}])
    found = gather(run)
    assert (found.step, found.step_seconds) == (10, 1.0)


HOUR = 3600.0


@pytest.mark.parametrize("ahead", [0.0, HOUR, -HOUR])
def test_a_job_on_another_machine_is_alive_if_its_heartbeat_changes(ahead, elsewhere, run, impatient):
    over = threading.Event()

    def beat():
        while not over.wait(0.1):
            elsewhere(time.time() + ahead)

    elsewhere(time.time() + ahead)
    thread = threading.Thread(target=beat)
    thread.start()
    try:
        reader = StatusReader(run)
        assert reader.read().state == "starting"
        assert heartbeat.address_of(run) == "127.0.0.1:1"
        with pytest.raises(ValueError, match="belongs to a job that still runs"):
            heartbeat.refuse_running(run)
    finally:
        over.set()
        thread.join()
    time.sleep(1.1)
    assert reader.read().state == "silent"


@pytest.mark.parametrize("ahead", [0.0, HOUR, -HOUR])
def test_a_job_on_another_machine_is_silent_if_its_heartbeat_does_not_change(
    ahead, elsewhere, run, capsys, monkeypatch
):
    monkeypatch.setattr(heartbeat, "SILENT_SECONDS", 0.2)
    elsewhere(time.time() + ahead)
    assert status(run, capsys)["state"] == "silent"
    heartbeat.refuse_running(run)
    with pytest.raises(ValueError, match="no job runs in"):
        heartbeat.address_of(run)


def test_a_zombie_is_dead(run, capsys):
    child = subprocess.Popen([sys.executable, "-c", ""])
    started = process_stat(child.pid).started
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    wrote(run, pid=child.pid, started=started)
    assert status(run, capsys)["state"] == "dead"
    child.wait()


def test_if_there_are_many_pipelines_only_incomplete_ones_have_a_line():
    everybody = [f"{d}.{s}" for d in range(64) for s in range(8)]
    lines = worker_map([w for w in everybody if w not in ("5.3", "40.7")], 64, 8)
    assert [line.split()[1] for line in lines[1:3]] == ["5", "40"] and lines[3].strip() == "62 whole pipelines"
    assert lines[1].count("·") == 1 and lines[1].count("■") == 7


def test_a_folder_without_a_run_is_reported_in_one_sentence_with_exit_code_2(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"recycle_pp: {tmp_path} contains no run: there is no config.yaml\n"


def test_faults_of_hardware_are_shown_while_they_last(recorded, tmp_path, capsys):
    run = RunFolder(tmp_path)
    for name in ("config.yaml", "metrics.jsonl"):
        (tmp_path / name).write_bytes((recorded.run.path / name).read_bytes())
    hot = HealthFound(
        worker="0.1", host="node3", device="GPU-7", signal="throttle", action="slow", detail="heat", factor=1.5
    )
    lines = [
        hot,
        msgspec.structs.replace(hot, signal="ecc", action="note"),
        HealthOver(worker="0.1", device="GPU-7", signal="ecc"),
    ]
    run.events.write_text("".join(json.dumps(event.line()) + "\n" for event in lines))
    device = {"worker": "0.1", "host": "node3", "device": "GPU-7", "temperature": 88.0, "clock": 1410.0}
    run.health.write_text(json.dumps({"time": 1.0, "devices": [device, device | {"temperature": 51.0}]}))
    seen = status(run, capsys)
    assert seen["health"] == ["worker 0.1, GPU-7 on node3: heat; its peers take over a part of its work"]
    assert seen["devices"][0]["temperature"] == 88.0
    main([str(tmp_path)])
    assert "2 GPUs: 51 to 88 C, 1410 MHz" in capsys.readouterr().out
