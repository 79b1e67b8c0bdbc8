"""docs/run-folder.md lists exactly the fields in the files of a real job."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from recycle_pp import replay
from recycle_pp.telemetry.contact_log import ContactLog
from recycle_pp.telemetry.events.catalog import EVENTS
from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.telemetry.run_reader import RunReader

DOCS = Path(__file__).parents[3] / "docs" / "run-folder.md"
SOMETIMES = {"val_loss", "val_samples"}
UNKNOWN = {"tflops", "mfu", "reserved_bytes"}  # of emulated compute on a CPU


@pytest.fixture
def run(recorded):
    return recorded.run


def table(section: str) -> list[tuple[list[str], str]]:
    """The rows of a section's table: the names in the first cell, and the second cell."""
    text = DOCS.read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("| `")]
    return [(re.findall(r"`(\w+)`", names), about) for names, about in rows]


def fields(section: str) -> set[str]:
    return {name for names, _ in table(section) for name in names}


def test_metrics(run):
    lines = run.lines(run.metrics)
    assert set().union(*lines) == fields("metrics.jsonl") - UNKNOWN
    assert all(fields("metrics.jsonl") - line.keys() <= SOMETIMES | UNKNOWN for line in lines)


def test_events(run):
    """`test_events.py` compares the document with the classes."""
    events = run.lines(run.events)
    assert {"death_detected", "resumed", "rejoined", "joining", "finished"} <= {e["event"] for e in events}
    for event in events:
        assert event.keys() == {"event", "term", *EVENTS[event["event"]].__struct_fields__}, event


def test_the_protocol_log_can_be_replayed_with_the_same_decisions(run, capsys):
    lines = [json.loads(line) for line in run.protocol.read_text().splitlines()]
    documented = {name for names, _ in table("Replay") for name in names}
    assert set().union(*lines) == documented
    assert replay.main([str(run.path), "--all"]) == 0
    printed = capsys.readouterr().out
    assert f"{len(lines) - 1} events repeated, and every decision is the same" in printed
    assert "vote from" in printed and "commit of step" in printed


@pytest.fixture
def copied(run, tmp_path):
    """A run folder with the configuration and the protocol.jsonl of the real job."""
    for path in (run.config, run.protocol):
        shutil.copy(path, tmp_path)
    return RunFolder(tmp_path)


@pytest.mark.parametrize("number", [0, 10])
def test_a_replay_of_a_damaged_file_prints_how_many_lines_it_left_out(number, copied, capsys):
    lines = copied.protocol.read_bytes().splitlines(keepends=True)
    left_out = f"{len(lines) - number} lines skipped: damaged, or after a damaged line and before the next snapshot"
    lines[number] = b"damaged\n"
    copied.protocol.write_bytes(b"".join(lines))
    assert replay.main([str(copied.path)]) == (0 if number else 2)
    out, error = capsys.readouterr()
    if number:
        assert out.endswith(f"{number - 1} events repeated, and every decision is the same; {left_out}\n")
    else:
        assert (out, error) == ("", f"recycle_pp: {copied.protocol}: no event can be repeated; {left_out}\n")


@pytest.mark.parametrize("step", [-1, 999])
def test_a_replay_refuses_a_step_that_is_not_in_the_file(step, copied, capsys):
    assert replay.main([str(copied.path), "--step", str(step)]) == 2
    out, error = capsys.readouterr()
    assert not out and re.fullmatch(rf"recycle_pp: --step {step}: {copied.protocol} has steps \d+ to \d+\n", error)


@pytest.mark.parametrize("section", ["summary.json", "profile.json", "heartbeat.json"])
def test_files_of_one_object(section, run):
    assert json.loads((run.path / section).read_text()).keys() == fields(section)


def test_the_receipts_of_first_ops(run):
    """Each process writes up to two receipts. Worker 1.1 has died, before or after the end of its first step, and has
    returned."""
    receipts = run.lines(run.first_ops)
    assert all(receipt.keys() == fields("receipts/first-forward.jsonl") for receipt in receipts)
    newest = RunReader(run).first_ops()
    assert {receipt.worker for receipt in newest} == {"0.0", "0.1", "1.0", "1.1"}
    assert all({"forward", "backward", "reduction"} == receipt.seconds.keys() for receipt in newest)
    assert all({"triton", "inductor"} == receipt.caches.keys() for receipt in newest)


def test_the_receipt_of_a_supervisor(tmp_path):
    run = RunFolder(tmp_path)
    contact = ContactLog(run, 3)
    contact.write("lost", "rank 0 at 10.0.0.1:29501")
    contact.write("gave_up", "no majority")
    contact.flush()
    lines = run.contact(3).read_text().splitlines()
    assert all(json.loads(line).keys() == fields("receipts/supervisor-3.jsonl") for line in lines)
    assert [(of.rank, of.what) for of in RunReader(run).contacts()] == [(3, "lost"), (3, "gave_up")]


def test_traces(run):
    trace = json.loads(run.trace(4).read_text())
    assert trace.keys() == fields("traces")
    ops = next(about for names, about in table("traces") if "ops" in names)
    assert {key for op in trace["ops"] for key in op} == set(re.findall(r"`(\w+)`", ops))


def test_the_counts_in_the_summary_agree_with_the_trace(run):
    from recycle_pp.drawing.chart import Chart
    from recycle_pp.drawing.measures import Measures

    summary = json.loads(run.summary.read_text())
    m = Measures.of(Chart.of(RunReader(run).trace(4)))
    resumed = [e for e in run.lines(run.events) if e["event"] == "resumed"]
    assert len(resumed) == 1 and m.lost > 0
    assert m.lost == m.redone == summary["lost_ops"] == summary["redone_ops"] == resumed[0]["lost_ops"]
    assert 0 < summary["bubbles"] < 1


def test_every_worker_has_its_own_log(run):
    logs = {path.name: path.read_text() for path in run.logs.glob("worker-*")}
    assert set(logs) == {f"worker-{d}.{s}.log" for d in range(2) for s in range(2)}
    peer, back = logs["worker-0.1.log"], logs["worker-1.1.log"]
    assert "step 4: generation 1, 3 workers: removed 1.1" in peer
    assert "step 4: received a plan for the rest of the step" in peer
    assert "sends its state to worker 1.1" in peer and "the job ended" in peer
    assert len(re.findall(r": (started|restarted) for rank \d: pid ", back)) == 2
    lines = [line for log in logs.values() for line in log.splitlines()]
    assert all(re.match(r"\d{4}-\d\d-\d\d .* worker \d\.\d: ", line) for line in lines), (
        "a log has only lines in this format"
    )


def test_a_replay_of_an_unknown_member_names_it_without_a_traceback(copied, capsys):
    lines = [json.loads(line) for line in copied.protocol.read_text().splitlines()]
    for line in lines:
        if line.get("event") and "member" in line["event"]:
            line["event"]["member"] = 777
    copied.protocol.write_text("".join(json.dumps(line) + "\n" for line in lines))
    code = replay.main([str(copied.path), "--all"])
    out, error = capsys.readouterr()
    assert code in (1, 2) and "777" in out + error
