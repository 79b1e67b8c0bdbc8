"""Exporters get metrics and events, and can neither end nor slow a job."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from recycle_pp.config.settings import Settings
from recycle_pp.telemetry.exporters import exporter
from recycle_pp.telemetry.exporters.exporter import refuse_missing, wanted
from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.testing.ports import free_ports

FAILS = ["parallel=2x2", "model=tiny", "run.steps=8", "run.validate_every=0", "+fail_at=4:1.1@backward"]


def test_every_event_goes_through_the_command_as_json(zygote, tmp_path):
    with zygote.run([*FAILS, f"run.on_event=cat >> {tmp_path}/events"]) as job:
        assert job.wait(60) == 0, job.output
        assert (tmp_path / "events").read_text() == job.run.events.read_text()


@pytest.mark.parametrize("command", ["sleep 1000", "exit 3", "true; no-such-command", "kill -9 $PPID"])
def test_a_command_that_hangs_or_fails_harms_nothing(command, zygote):
    with zygote.run([*FAILS, f"run.on_event={command}"]) as job:
        assert job.wait(60) == 0, job.output
        assert len(job.run.lines(job.run.metrics)) == 8
        assert "Traceback" not in job.output


def test_a_command_does_not_see_the_jobs_secret(zygote, tmp_path):
    with zygote.run([*FAILS, f"run.on_event=env >> {tmp_path}/env"], environment={"RECYCLE_TOKEN": "secret"}) as job:
        assert job.wait(60) == 0, job.output
    text = (tmp_path / "env").read_text()
    assert "secret" not in text and f"RECYCLE_RUN_DIR={job.run.path}" in text


def test_tensorboard_has_the_curves_and_the_deaths_and_stalls_beside_them(zygote):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with zygote.run([*FAILS, "log=tensorboard"]) as job:
        assert job.wait(60) == 0, job.output
        board = EventAccumulator(str(job.run.path / "tensorboard"))
        board.Reload()
        losses = {e.step: e.value for e in board.Scalars("loss")}
        assert losses == {m["step"]: pytest.approx(m["loss"], rel=1e-6) for m in job.run.lines(job.run.metrics)}
        assert [(e.step, e.value) for e in board.Scalars("events/deaths")] == [(4, 1.0)]
        assert board.Scalars("events/stall_ms")[0].value > 0
        shown = {e.step: e.tensor_proto.string_val[0].decode() for e in board.Tensors("events")}  # the last of each
        assert "worker 1.1 died" in shown[4] and "step 4: plan adopted" in shown[4]
        # `resumed` has the step that runs when the recovery is complete: 5 if step 4 was committed meanwhile.
        assert any("continues after a stall of" in shown.get(step, "") for step in (4, 5))


def test_prometheus_shows_the_newest_step_and_counts_deaths(zygote):
    pytest.importorskip("prometheus_client")
    port = free_ports()
    steps = ["run.steps=100000", "emulate=sleep"]
    with zygote.run([*FAILS, *steps, f"log.prometheus={port}"]) as job:
        job.wait_for_event("resumed", 60)
        deadline, text = time.monotonic() + 20, ""
        while 'recycle_stall_seconds_total{run="run"}' not in text and time.monotonic() < deadline:
            time.sleep(0.2)
            text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
        values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        assert float(values['recycle_deaths_total{cause="signal",run="run"}']) == 1
        assert float(values['recycle_step{run="run"}']) >= 3 and float(values['recycle_live_workers{run="run"}']) >= 3


def test_a_port_that_is_taken_costs_a_sentence_not_the_job(zygote):
    pytest.importorskip("prometheus_client")
    with socket.create_server(("0.0.0.0", 0)) as taken:
        with zygote.run([*FAILS, f"log.prometheus={taken.getsockname()[1]}"]) as job:
            assert job.wait(60) == 0, job.output
            assert "log.prometheus has ended with code 2: prometheus: " in job.output


def test_wandb_works_offline(zygote):
    pytest.importorskip("wandb")
    with zygote.run([*FAILS, "log=wandb"], environment={"WANDB_MODE": "offline", "WANDB_SILENT": "true"}) as job:
        assert job.wait(90) == 0, job.output
        (folder,) = (job.run.path / "wandb").glob("offline-run-*")
        (file,) = folder.glob("*.wandb")
        data = file.read_bytes()
        assert b"worker 1.1 died" in data and b"tokens_per_second" in data


def test_a_run_that_has_ended_can_be_exported_too(zygote, tmp_path):
    with zygote.run(FAILS) as job:
        assert job.wait(60) == 0, job.output
        command = [sys.executable, "-m", "recycle_pp.telemetry.exporters", str(job.run.path)]
        done = subprocess.run([*command, "command", f"cat >> {tmp_path}/events"], stdin=subprocess.DEVNULL, timeout=60)
        assert done.returncode == 0
        assert (tmp_path / "events").read_text() == job.run.events.read_text()


def test_a_missing_package_is_said_before_any_worker_starts(monkeypatch):
    settings = Settings()
    settings.log.tensorboard = True
    monkeypatch.setattr(exporter, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"log.tensorboard needs .* pip install -e '.\[tensorboard\]'"):
        refuse_missing(settings)
    assert list(wanted(settings)) == ["tensorboard"] and wanted(Settings()) == {}


def test_another_coordinator_does_not_pass_on_again_what_the_first_one_did(tmp_path):
    """It begins where the files end when it takes over."""
    (tmp_path / "logs").mkdir()
    events = tmp_path / "events.jsonl"
    old, new = (json.dumps({"event": name, "step": 0, "time": 0.0, "worker": None}) + "\n" for name in ("old", "new"))
    events.write_text(old)
    skip = f"--skip=0,{len(old)}"
    command = [sys.executable, "-m", "recycle_pp.telemetry.exporters", skip, str(tmp_path), "command", "cat >> seen"]
    with events.open("a") as file:
        file.write(new)
    subprocess.run(command, stdin=subprocess.DEVNULL, cwd=tmp_path, timeout=60, check=True, env=dict(os.environ))
    assert json.loads((tmp_path / "seen").read_text())["event"] == "new"


def test_prometheus_exports_no_measure_before_its_first_value(tmp_path):
    pytest.importorskip("prometheus_client")
    from recycle_pp.telemetry.exporters.prometheus import make

    port = free_ports()
    exported = make(RunFolder(tmp_path), str(port))
    try:
        exported.step({"step": 0, "loss": 2.5})
        text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
    finally:
        exported.close()
    assert "recycle_loss{" in text and "recycle_val_loss{" not in text
