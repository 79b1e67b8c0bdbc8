"""If a file in a run folder is damaged, each command that needs it prints one sentence and exits with 2."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recycle_pp import report, status, visualize
from recycle_pp.config.checks import validate
from recycle_pp.config.compose import compose
from recycle_pp.config.resume import take_up
from recycle_pp.coordinator.checkpoints import newest_whole
from recycle_pp.coordinator.planning import load
from recycle_pp.fitting.profile import Profile
from recycle_pp.simulation.measured import job_of
from recycle_pp.state.checkpoint import describe, refuse_mismatch
from recycle_pp.state.hf_folder import of_run
from recycle_pp.telemetry.heartbeat import Heartbeat, refuse_running
from recycle_pp.telemetry.history import History
from recycle_pp.telemetry.run_folder import RunFolder

from .drawing.examples import recovered

JOB = ["parallel=2x2", "model=tiny", "run.steps=10", "run.validate_every=0", "model.split=null"]
CHECKPOINT = "checkpoints/step-000002"
TRACE = "traces/step-000003.json"
FILES = (
    "config.yaml",
    "metrics.jsonl",
    "events.jsonl",
    "samples.jsonl",
    "heartbeat.json",
    "profile.json",
    "summary.json",
    TRACE,
    f"{CHECKPOINT}/about.json",
)
EVENT = {"time": 1.0, "step": 3, "generation": 1, "worker": "1.1", "cause": "signal", "detail": "SIGKILL"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, dict[str, str]]:
    """A run of five steps with a death and a checkpoint, and the content of its files."""
    job = compose([*JOB, f"run.dir={tmp_path_factory.mktemp('run')}"])
    run = RunFolder.create(job)
    run.unlock()
    steps = [{"step": step, "loss": 5.0 - step, "step_seconds": 0.1, "cpu_seconds": 0.1} for step in range(5)]
    events = [
        {"event": "started", **EVENT},
        {"event": "death_detected", **EVENT},
        {"event": "resumed", **EVENT, "dead": ["1.1"], "stall_seconds": 0.1, "lost_ops": 1, "redone_ops": 1},
    ]
    for path, records in ((run.metrics, steps), (run.events, events)):
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    run.samples.write_text('{"step": 0, "samples": [1, 2]}\n')
    seconds = {"turn_seconds": 0.0, "message_seconds": 0.0, "sum_seconds": [0.0, 0.0]}
    durations = {kind: [0.1, 0.1] for kind in "FIWBO"}
    run.write_json(run.profile, {"durations_seconds": durations, "steps": 3, "boundary_bytes": [8], **seconds})
    run.write_json(run.summary, {"steps": 5, "samples": 10, "tokens": 100, "wall_seconds": 1.0, "lost_ops": 1})
    recovered().save(run.path / TRACE)
    place = run.path / CHECKPOINT
    place.mkdir()
    (place / ".metadata").write_bytes(b"table")
    files = {".metadata": [5, zlib.crc32(b"table")]}
    run.write_json(place / "about.json", {"step": 2, **describe(job, "data"), "files": files})
    Heartbeat(run, lambda: 0, "127.0.0.1:1").end([], 0)
    return run, {name: (run.path / name).read_text() for name in FILES}


numbers = st.integers(-3, 40) | st.sampled_from([10**9, 10**15, 10**19, -(10**30)]) | st.floats()
json_values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@st.composite
def changed(draw: st.DrawFn, text: str) -> bytes:
    """The file's JSON or YAML with one value replaced, removed or added; or arbitrary JSON or bytes."""
    kind = draw(st.sampled_from(["bytes", "json", "cut", "value", "value", "value", "value"]))
    if kind == "bytes":
        return draw(st.binary(max_size=20))
    if kind == "json":
        return json.dumps(draw(json_values)).encode() + b"\n"
    if kind == "cut":
        return text.encode()[: draw(st.integers(0, len(text)))]
    lines = [json.loads(line) for line in text.splitlines()] if text.count("}\n{") else [yaml.safe_load(text)]
    place = draw(st.sampled_from(lines))
    while True:
        key = draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if not place[key] or not isinstance(place[key], dict | list) or draw(st.booleans()):
            break
        place = place[key]
    if draw(st.integers(0, 4)):
        place[key] = draw(json_values)
    else:
        del place[key]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def commands(run: RunFolder) -> Iterator[tuple[str, Any]]:
    """Pairs of a name and a function, which returns an exit code or raises a ValueError with one sentence."""
    path = str(run.path)
    yield "status", lambda: status.main([path])
    yield "status --json", lambda: status.main([path, "--json"])
    yield "report", lambda: report.main([path])
    yield "visualize", lambda: visualize.main([path])
    yield "export", lambda: of_run(path, None, torch.float32)
    yield "simulate", lambda: simulate(run)
    yield "resume", lambda: resume(run)


def simulate(run: RunFolder) -> None:
    job_of(run.path)


def resume(run: RunFolder) -> None:
    """Reads the files that rank 0, a worker and a new coordinator read."""
    again, _ = take_up((*JOB, f"run.dir={run.path}", "run.resume=true"), run.read_config())
    validate(again, 4)
    refuse_running(run)
    whole = newest_whole(run.checkpoints)
    RunFolder.create(again, whole.step).unlock()
    refuse_mismatch(run.path / CHECKPOINT, describe(compose(JOB), "data"))
    History.read(run)
    asyncio.run(load(Profile(again), run.profile))


def exit_code(call: Any, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    try:
        code = call()
        return code or 0, capsys.readouterr().err
    except ValueError as error:
        capsys.readouterr()
        return 2, f"{error}\n"


def test_every_command_reads_an_undamaged_folder(whole, capsys) -> None:
    run, contents = whole
    codes = {name: exit_code(call, capsys) for name, call in commands(run)}
    restore(run, contents)
    assert codes.pop("export")[0] == 2  # its checkpoint has no tensors
    assert codes == {name: (0, "") for name in codes}


@given(data=st.data(), name=st.sampled_from(FILES))
@settings(max_examples=20 if settings.default.derandomize else 100, suppress_health_check=list(HealthCheck))
def test_damage_is_reported_in_one_sentence_with_exit_code_2(whole, capsys, data: st.DataObject, name: str) -> None:
    run, contents = whole
    content = data.draw(changed(contents[name]))
    for command, call in commands(run):
        (run.path / name).write_bytes(content)
        code, said = exit_code(call, capsys)
        restore(run, contents)
        assert code in (0, 1, 2), (command, code)
        assert code != 2 or (said.count("\n") == 1 and said.strip()), (command, said)


def restore(run: RunFolder, contents: dict[str, str]) -> None:
    for name, text in contents.items():
        (run.path / name).write_text(text)
