"""The report of a run, from its folder alone."""

import json
import os
import subprocess
import sys
import time

import pytest

from recycle_pp.config.loading import load
from recycle_pp.telemetry.report import report
from recycle_pp.telemetry.run_folder import RunFolder


@pytest.fixture
def run(tmp_path):
    run = RunFolder.create(load({"run": {"dir": str(tmp_path / "runs" / "mine")}}))
    steps = [
        {"step": step, "loss": 5.5 - step / 10, "val_loss": 3.0 if step == 29 else None, "val_samples": 32}
        for step in range(30)
    ]
    run.metrics.write_text("".join(json.dumps(step) + "\n" for step in steps))
    return run


def write_events(run, *events):
    run.events.write_text("".join(json.dumps({"generation": 1, "worker": None, **event}) + "\n" for event in events))


DEATH = {
    "event": "death_detected",
    "time": 20.2,
    "step": 20,
    "worker": "1.2",
    "cause": "signal",
    "detail": "SIGKILL",
    "injected": True,
}
RESUMED = {
    "event": "resumed",
    "time": 20.3,
    "step": 20,
    "dead": ["1.2"],
    "stall_seconds": 0.0512,
    "lost_ops": 9,
    "redone_ops": 7,
}


def test_a_death_is_reported_with_the_loss_around_it_its_stall_and_its_lost_ops(run):
    write_events(
        run, DEATH, {"event": "plan_adopted", "step": 20}, RESUMED, {"event": "rejoined", "step": 25, "worker": "1.2"}
    )
    run.write_json(
        run.summary, {"steps": 30, "samples": 1080, "tokens": 69120, "wall_seconds": 12.34, "weights_sha256": "ab12"}
    )
    assert report(run).splitlines()[1:] == [
        "  loss 5.5000 in step 0, 2.6000 in step 29, 3.0000 on 32 held-out samples",
        "  step 20: worker 1.2 died (killed by SIGKILL, an injected failure): "
        "loss 3.6000 (step 19), 3.5000 (step 20), 3.4000 (step 21)",
        "    stalled 51 ms; 9 ops lost, 7 redone by peers",
        "  step 25: worker 1.2 is back: loss 3.1000 (step 24), 3.0000 (step 25), 2.9000 (step 26)",
        "  30 steps, 1,080 samples, 69,120 tokens; 12.3 s since the last start",
        "  weights sha256 ab12",
    ]


def test_the_report_of_a_long_run_with_many_deaths_takes_seconds(run):
    count = 3000
    with run.metrics.open("w") as file:
        file.writelines(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in range(10 * count))
    write_events(run, *({**each, "step": 10 * n, "time": 10.0 * n} for n in range(count) for each in (DEATH, RESUMED)))
    started = time.process_time()
    assert report(run).count("stalled 51 ms") == count
    assert time.process_time() - started < 5.0


def test_a_move_of_layers_is_reported_with_its_expected_gain_and_cost(run):
    move = {
        "event": "rebalanced", "time": 21.0, "step": 21, "before": [8, 8], "layout": [9, 7], "first_step": 20,
        "step_seconds": 0.6, "new_step_seconds": 0.5, "gain_seconds": 99.0, "cost_seconds": 0.1, "bytes": 7_000_000,
        "seconds": 1.5, "stall_seconds": 0.02,
    }  # fmt: skip
    write_events(run, DEATH, RESUMED, move)
    assert report(run).splitlines()[4:6] == [
        "  step 21: layers have moved, 8 8 -> 9 7 by stage, after 1.5 s and with a stall of 20 ms; planned steps take "
        "0.5 s instead of 0.6 s",
        "    expected to gain 99 s and to cost 0.1 s; 7 MB sent",
    ]


def test_a_run_without_deaths_is_reported_as_such(run):
    assert "  no worker died" in report(run).splitlines()


def test_a_job_that_did_not_survive_is_reported_as_such(run):
    write_events(run, DEATH | {"step": 30})
    assert "    the job did not continue" in report(run).splitlines()


def test_the_death_of_a_joining_worker_stalls_no_worker(run):
    write_events(run, DEATH)
    assert "    no worker had to wait" in report(run).splitlines()


RESTORED = {"event": "restored", "time": 21.0, "step": 6, "checkpoint": 6, "undone_from": 6, "undone_to": 19}


def test_deaths_that_roll_back_steps_are_reported_with_these_steps_and_the_time_to_the_next_commit(run):
    lines = [{"step": step, "time": step + (22.5 if step > 5 else 0.5)} for step in range(30)]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_events(run, DEATH | {"worker": "0.2"}, DEATH, RESTORED)
    cost = (
        "    all workers restarted from checkpoint step-000006; 14 steps rolled back (6 to 19); "
        "8.3 s until the next commit"
    )
    assert report(run).splitlines()[3:6:2] == [cost, cost]


@pytest.mark.parametrize(
    ("first", "last", "undone"),
    [(6, 6, "1 step rolled back"), (None, None, "no step rolled back"), (6, 7, "2 steps rolled back (6 to 7)")],
)
def test_a_restart_whose_steps_were_rolled_back_again_has_no_time_to_the_next_commit(run, first, last, undone):
    earlier = RESTORED | {"undone_from": first, "undone_to": last}
    lines = [{"step": step, "time": step + 22.5} for step in range(30)]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_events(run, DEATH, earlier, RESTORED | {"time": 22.0})
    assert f"    all workers restarted from checkpoint step-000006; {undone}" in report(run).splitlines()


@pytest.mark.parametrize(
    ("between", "last"),
    [([RESUMED], 19), ([{"event": "started", "time": 20.5, "step": 20}], 19), ([RESUMED | {"dead": ["0.0"]}], 25)],
)
def test_a_later_restart_is_not_the_cost_of_a_death_that_others_had_survived(run, between, last):
    write_events(run, DEATH, *between, RESTORED | {"undone_to": last})
    assert "restarted" not in report(run)


def test_each_death_has_its_own_stall_even_if_its_event_comes_after_the_recovery(run):
    again = DEATH | {"step": 25, "time": 25.1}
    early = RESUMED | {"step": 25, "time": 25.0, "dead": ["0.0", "1.2"], "stall_seconds": 0.2}
    write_events(run, DEATH, RESUMED, early, again)
    text = report(run)
    assert text.index("step 20: worker 1.2") < text.index("stalled 51 ms") < text.index("step 25: worker 1.2")
    assert text.index("step 25: worker 1.2") < text.index("stalled 200 ms")


def test_the_command_reads_the_named_or_the_newest_run_and_rejects_other_folders(run, tmp_path):
    def command(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "recycle_pp.report", *arguments],
            cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    assert command(str(run.path)).stdout == report(run) + "\n"
    assert "no worker died" in command().stdout
    helped = command("--help")
    assert (helped.returncode, helped.stderr) == (0, "") and "the newest run under runs/" in helped.stdout
    reader, writer = os.pipe()
    os.close(reader)  # as after `| head`
    with open(writer, "wb") as closed:
        left = [sys.executable, "-m", "recycle_pp.report", str(run.path)]
        done = subprocess.run(left, stdout=closed, stderr=subprocess.PIPE, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    nothing = command("runs/nothing")
    assert (nothing.returncode, nothing.stdout) == (2, "")
    assert nothing.stderr == "recycle_pp: runs/nothing contains no run: there is no config.yaml\n"


@pytest.mark.parametrize("content", [b"", b"\xff\x00", b"- 1", b"a: ["])
def test_a_damaged_config_is_named(run, content):
    run.config.write_bytes(content)
    with pytest.raises(ValueError, match=r"config\.yaml cannot be read: "):
        report(run)
