"""Exporters get metrics and events, and cannot end or delay a job."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from types import SimpleNamespace

import pytest

from recycle_pp.config.settings import Settings
from recycle_pp.telemetry.exporters import __main__ as process
from recycle_pp.telemetry.exporters import exporter, processes
from recycle_pp.telemetry.exporters.exporter import Exporter, refuse_missing, wanted
from recycle_pp.telemetry.exporters.processes import Exporters
from recycle_pp.telemetry.heartbeat import Heartbeat, Pulse
from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.testing.ports import free_ports
from tests.recorded import SECRET, STEPS

COMMAND = [sys.executable, "-m", "recycle_pp.telemetry.exporters"]
FAILS = ["parallel=2x2", "model=tiny", "run.steps=8", "run.validate_every=0", "+fail_at=4:1.1@backward"]


def export(run, name, *arguments):
    """Exports a complete run in the same way as its coordinator. Standard input ends with the job."""
    return subprocess.run(
        [*COMMAND, str(run.path), name, *arguments],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_the_command_gets_every_event_as_json(recorded):
    assert recorded.passed_on == recorded.run.events.read_text()


def test_a_command_does_not_see_the_jobs_secret(recorded):
    assert SECRET not in recorded.environment and f"RECYCLE_RUN_DIR={recorded.path}" in recorded.environment


@pytest.mark.parametrize("command", ["exit 3", "true; no-such-command"])
def test_a_command_that_fails_does_not_end_its_exporter(command, recorded):
    assert export(recorded.run, "command", command).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("command", ["sleep 1000", "kill -9 $PPID"])
def test_exporters_that_hang_or_end_do_not_disturb_the_job(command, zygote):
    pytest.importorskip("prometheus_client")
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        with zygote.run([*FAILS, f"run.on_event={command}", f"log.prometheus={port}"]) as job:
            assert job.wait(60) == 0, job.output
            assert len(job.run.lines(job.run.metrics)) == 8
            assert "log.prometheus has ended with code 2: prometheus: " in job.output
            assert "Traceback" not in job.output


def test_tensorboard_has_the_curves_the_deaths_and_the_stalls(recorded):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(recorded.run.path / "tensorboard"))
    board.Reload()
    metrics = recorded.run.lines(recorded.run.metrics)
    losses = {e.step: e.value for e in board.Scalars("loss")}
    assert losses == {m["step"]: pytest.approx(m["loss"], rel=1e-6) for m in metrics}
    assert [(e.step, e.value) for e in board.Scalars("events/deaths")] == [(4, 1.0)]
    assert board.Scalars("events/stall_ms")[0].value > 0
    # step -> its last text
    shown = {e.step: e.tensor_proto.string_val[0].decode() for e in board.Tensors("events")}
    assert "worker 1.1 died" in shown[4] and "step 4: plan adopted" in shown[4]
    # `resumed` has the step that runs when the recovery is complete: 5 if step 4 was committed meanwhile.
    assert any("continues after a stall of" in shown.get(step, "") for step in (4, 5))


def test_prometheus_shows_the_newest_step_and_counts_deaths(recorded):
    pytest.importorskip("prometheus_client")
    port = free_ports()
    command = [*COMMAND, recorded.path, "prometheus", str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE):
        deadline, text = time.monotonic() + 20, ""
        last = ('recycle_deaths_total{cause="signal",run="run"}', f'recycle_step{{run="run"}} {STEPS - 1}.0')
        while not all(line in text for line in last) and time.monotonic() < deadline:
            time.sleep(0.1)
            with suppress(OSError):
                text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values['recycle_deaths_total{cause="signal",run="run"}']) == 1
    assert float(values['recycle_step{run="run"}']) == STEPS - 1
    assert float(values['recycle_live_workers{run="run"}']) == 4


def test_wandb_works_offline(recorded):
    pytest.importorskip("wandb")
    (folder,) = (recorded.run.path / "wandb").glob("offline-run-*")
    (file,) = folder.glob("*.wandb")
    data = file.read_bytes()
    assert b"worker 1.1 died" in data and b"tokens_per_second" in data


def test_a_run_that_has_ended_can_be_exported(recorded, tmp_path):
    assert export(recorded.run, "command", f"cat >> {tmp_path}/events").returncode == 0
    assert (tmp_path / "events").read_text() == recorded.run.events.read_text()


class Seen(Exporter):
    def __init__(self, event=lambda record: None):
        self.steps, self.events, self.closed, self._event = [], 0, False, event

    def step(self, record):
        self.steps.append(record["step"])

    def event(self, record):
        self.events += 1
        self._event(record)

    def close(self):
        self.closed = True


def test_a_long_run_that_has_ended_is_exported_from_its_first_step(tmp_path, monkeypatch):
    count = 3 * process.MOST_BEHIND
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in range(count)))
    monkeypatch.setattr(process, "_over", lambda run, pulse: True)
    monkeypatch.setattr(process.signal, "alarm", lambda seconds: None)
    seen = Seen()
    process.follow(RunFolder(tmp_path), seen)
    assert seen.steps == list(range(count)) and seen.closed


def test_ctrl_c_on_a_terminal_ends_the_export_cleanly(tmp_path):
    def interrupted(record):
        raise KeyboardInterrupt

    (tmp_path / "events.jsonl").write_text('{"event": "started", "step": 0, "time": 1.0, "worker": null}\n')
    seen = Seen(interrupted)
    process.follow(RunFolder(tmp_path), seen)
    assert seen.events == 1 and seen.closed


def test_an_export_on_a_terminal_ends_with_a_run_that_was_stopped(tmp_path, monkeypatch):
    run = RunFolder(tmp_path)
    monkeypatch.setattr(process.sys, "stdin", SimpleNamespace(isatty=lambda: True))
    assert not process._over(run, Pulse(run))
    Heartbeat(run, lambda: 0, "127.0.0.1:1").end([], code=130)
    assert process._over(run, Pulse(run))


def test_an_exporter_that_hangs_or_skips_records_is_reported_once(tmp_path, monkeypatch, capfd):
    from recycle_pp.telemetry import warn

    monkeypatch.setattr(processes, "CLOSE_SECONDS", 0.1)
    run = RunFolder(tmp_path)
    run.make()
    log = run.logs / "command.log"
    log.write_text("too slow: 7 records are skipped\n")  # by the exporter of an earlier coordinator
    hangs = [sys.executable, "-c", "import time; time.sleep(60)"]
    popen = subprocess.Popen
    monkeypatch.setattr(processes.subprocess, "Popen", lambda command, **options: popen(hangs, **options))
    exporters = Exporters(Settings().with_values({"run.on_event": "true"}), run)
    try:
        assert exporters._later.flush(10.0)
        exporters._look()
        assert warn.flush(5.0) and "skips" not in capfd.readouterr().err
        with log.open("a") as file:
            file.write("too slow: 9 records are skipped\n")
        exporters._look()
        exporters._look()
        exporters._close()
        assert warn.flush(5.0)
        shown = capfd.readouterr().err
        assert shown.count("run.on_event is too slow and skips records") == 1
        assert shown.count("run.on_event lacks the last records, because its process hangs") == 1
    finally:
        exporters.kill()


def test_a_missing_package_is_reported_before_the_workers_start(monkeypatch):
    settings = Settings().with_values({"log.tensorboard": True})
    monkeypatch.setattr(exporter, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"log.tensorboard needs .* pip install -e '.\[tensorboard\]'"):
        refuse_missing(settings)
    assert list(wanted(settings)) == ["tensorboard"] and wanted(Settings()) == {}


def test_a_new_coordinator_does_not_export_lines_of_the_first_one_again(tmp_path):
    """Its exporter starts at the ends of the files."""
    (tmp_path / "logs").mkdir()
    events = tmp_path / "events.jsonl"
    old, new = (json.dumps({"event": name, "step": 0, "time": 0.0, "worker": None}) + "\n" for name in ("old", "new"))
    events.write_text(old)
    skip = f"--skip=0,{len(old)}"
    command = [*COMMAND, skip, str(tmp_path), "command", "cat >> seen"]
    with events.open("a") as file:
        file.write(new)
    subprocess.run(command, stdin=subprocess.DEVNULL, cwd=tmp_path, timeout=60, check=True, env=dict(os.environ))
    assert json.loads((tmp_path / "seen").read_text())["event"] == "new"


def test_prometheus_exports_no_measure_before_its_first_value(tmp_path):
    pytest.importorskip("prometheus_client")
    from recycle_pp.telemetry.exporters.prometheus import Prometheus

    port = free_ports()
    exported = Prometheus(RunFolder(tmp_path), str(port))
    try:
        exported.step({"step": 0, "loss": 2.5})
        text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
    finally:
        exported.close()
    assert "recycle_loss{" in text and "recycle_val_loss{" not in text


def test_prometheus_shows_the_figures_of_gpus_and_the_current_findings(tmp_path):
    pytest.importorskip("prometheus_client")
    from recycle_pp.telemetry.exporters.prometheus import Prometheus

    def shown():
        text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
        lines = [line for line in text.splitlines() if line.startswith(("recycle_health{", "recycle_device"))]
        return {line.replace(f'run="{tmp_path.name}",', "") for line in lines}

    device = {"worker": "0.1", "host": "a", "device": "GPU-7", "temperature": 88.0, "power": None}
    (tmp_path / "health.json").write_text(json.dumps({"time": 1.0, "devices": [device]}))
    found = {"worker": "0.1", "host": "a", "device": "GPU-7", "signal": "ecc", "detail": "2 errors", "factor": 1.0}
    port = free_ports()
    exported = Prometheus(RunFolder(tmp_path), str(port))
    try:
        exported.step({"step": 0})
        for action in ("note", "drain"):
            exported.event({"event": "health_found", "step": 0, "action": action, **found})
        finding = 'recycle_health{action="drain",device="GPU-7",signal="ecc",worker="0.1"} 1.0'
        figure = 'recycle_device_temperature{device="GPU-7",host="a",worker="0.1"} 88.0'
        assert shown() == {finding, figure}
        exported.event({"event": "health_over", "step": 1, **found})
        assert shown() == {figure}
        (tmp_path / "health.json").write_text(json.dumps({"time": 2.0, "devices": [device | {"worker": "0.2"}]}))
        exported.step({"step": 1})
        assert shown() == {figure.replace("0.1", "0.2")}, "the process has another role"
    finally:
        exported.close()
