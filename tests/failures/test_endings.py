"""If a job cannot continue, its exit code and last line give the reason, and no wrong state is saved."""

import json
import os
import re
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest

from recycle_pp.telemetry.run_folder import RunFolder

from .harness import TEXT, Case, SignalAt, explain, fails

KIND = "endings"
slow = pytest.mark.slow


def run(runs, case, **plan):
    """The outcome, and the last line of its output."""
    outcome = runs.of(case, KIND, environment={"RECYCLE_SABOTAGE": json.dumps(plan)})
    return outcome, outcome.output.splitlines()[-1]


def checkpoints(outcome):
    return [e["checkpoint"] for e in outcome.all("checkpoint_saved")]


TWO_DIFFER, ONE_OF_THREE = "workers 0.1 and 1.1 hold different weights", "holds different weights than"


@slow  # quick counterpart: test_mismatch.py
@pytest.mark.parametrize(
    ("shape", "says", "stagger"),
    [
        ("2x2", TWO_DIFFER, False),
        pytest.param("3x2", ONE_OF_THREE, True, marks=slow),
        pytest.param("2x2", TWO_DIFFER, True, marks=slow),
        pytest.param("3x2", ONE_OF_THREE, False, marks=slow),
    ],
)
def test_a_bit_that_flips_in_one_workers_weights_ends_the_job_at_the_next_checkpoint(
    shape, says, stagger, sabotaged, tmp_path
):
    case = Case("a bit flips", shape, ("checkpoint.every=4",), steps=40, stagger=stagger, deaths=0, ends=says)
    outcome, last = run(sabotaged, case, flip=1, step=5, once=str(tmp_path / "flipped"))
    compared = int(re.search(r"after (\d+) steps", last)[1])
    assert outcome.code == 1 and says in last and compared in range(8, 40, 4), explain(outcome)
    assert checkpoints(outcome) == [4], "no checkpoint with wrong weights may be completed"
    skipped = [e["checkpoint"] for e in outcome.all("checkpoint_skipped")]
    assert skipped == [*range(8, compared, 4)], "only a slow disk may delay the comparison"
    assert "step-000004, saved earlier" in last


@slow
def test_without_checkpoints_a_flipped_bit_is_found_at_the_end_of_the_job(sabotaged, tmp_path):
    says = "workers 0.1 and 1.1 hold different weights"
    case = Case("a bit flips, and no checkpoint is saved", "2x2", steps=8, deaths=0, ends=says)
    outcome, last = run(sabotaged, case, flip=1, step=5, once=str(tmp_path / "flipped"))
    assert outcome.code == 1 and says in last and "there is no earlier checkpoint" in last, explain(outcome)
    assert not outcome.summary and not checkpoints(outcome)


@pytest.mark.parametrize(
    ("shape", "copies", "says"),
    [
        pytest.param("2x2", 2, "hold different copies of unit 0", marks=slow),
        ("3x2", 3, "holds a different copy of unit 0"),
    ],
)
def test_a_bit_that_flips_in_sharded_state_ends_the_job_in_the_same_step(shape, copies, says, sabotaged, tmp_path):
    """The holders of a block compare their copies in every vote. With three copies, the wrong one can be identified."""
    sharded = ("parallel.sharded=true", f"parallel.optimizer_copies={copies}", "checkpoint.every=4")
    case = Case("a bit of a master flips", shape, sharded, steps=40, deaths=0, ends=says)
    flipped = tmp_path / "flipped"
    outcome, last = run(sabotaged, case, flip=1, step=5, once=str(flipped))
    assert outcome.code == 1 and says in last and "found in step 5" in last, explain(outcome)
    assert f" on {socket.gethostname()}" in last
    # There is no checkpoint if a slow disk is still writing the first one.
    assert "run.resume=true" in last and checkpoints(outcome) in ([], [4])


def test_a_skipped_update_is_reported_and_the_job_continues(sabotaged):
    case = Case("two gradients are not finite", "2x2", ("checkpoint.every=4",), steps=10, deaths=0)
    outcome, _ = run(sabotaged, case, nan=0, steps=[2, 3])
    assert [(e["step"], e["in_a_row"]) for e in outcome.all("update_skipped")] == [(3, 1), (4, 2)], explain(outcome)
    assert [line["step"] for line in outcome.metrics if line["clip_scale"] is None] == [2, 3]
    assert outcome.output.count("the update is skipped: a gradient is NaN") == 2
    assert checkpoints(outcome) in ([8, 10], [10]), "no checkpoint may be saved while the weights may be bad"


@slow
@pytest.mark.parametrize("seconds", [0, 2])
def test_after_five_skipped_updates_in_a_row_the_job_stops_with_the_last_good_checkpoint(seconds, sabotaged, tmp_path):
    """Even if the last good checkpoint is still being written at that time."""
    says = "steps in a row were skipped"
    claim = f"no gradient is finite, a checkpoint takes {seconds} s"
    case = Case(claim, "2x2", ("checkpoint.every=4",), steps=400, deaths=0, ends=says)
    slow = {"hang": "save", "seconds": seconds, "once": str(tmp_path / "hung")}
    outcome, last = run(sabotaged, case, nan=0, steps=[*range(4, 400)], **slow)
    assert outcome.code == 1 and says in last and last.endswith("/checkpoints/step-000004")
    assert len(outcome.all("update_skipped")) >= 5 and checkpoints(outcome) == [4], explain(outcome)


@slow
def test_the_count_of_skipped_updates_survives_the_loss_of_the_coordinator(sabotaged):
    says = "the updates of 5 steps in a row were skipped"
    host = SignalAt("update_skipped", "0.0", nth=2, supervisor=True)
    case = Case("no gradient is finite, and the host dies", "2x2", (), (host,), steps=400, nodes=4, ends=says)
    outcome, _ = run(sabotaged, case, nan=0, steps=[*range(4, 400)])
    assert outcome.all("coordinator_elected") and outcome.metrics[-1]["step"] == 8, explain(outcome)


@slow
def test_a_token_outside_the_vocabulary_ends_the_job_with_one_sentence_and_no_death(runs, tmp_path):
    tokens = np.arange(40000, dtype=np.uint16) % 256
    tokens[17000] = 999
    tokens.tofile(tmp_path / "poisoned.bin")
    says = (
        f"data.path: {tmp_path / 'poisoned.bin'} contains token 999; model.vocabulary must be at least 1000, "
        "but it is 256"
    )
    data = (f"data.path={tmp_path / 'poisoned.bin'}",)
    outcome, last = run(runs, Case("a poisoned sample", "3x2", data, steps=200, deaths=0, ends=says))
    assert outcome.code == 2 and last.endswith(says), explain(outcome)


@slow
@pytest.mark.parametrize("shape", ["2x2", "3x2"])
def test_a_file_with_half_a_token_ends_the_job_with_one_sentence(shape, runs, tmp_path):
    path = tmp_path / "odd.bin"
    path.write_bytes(bytes(40001))
    says = f"{path} has 40001 bytes, which is not a whole number of uint16 tokens"
    outcome, last = run(runs, Case("half a token", shape, (f"data.path={path}",), deaths=0, ends=says))
    assert outcome.code == 2 and last.endswith(says), explain(outcome)


@slow
def test_a_returning_worker_that_cannot_read_the_data_does_not_end_the_job(runs, tmp_path):
    """As if the disk of its node had failed. The other nodes still have the data."""
    text = tmp_path / "text"
    text.write_bytes(TEXT.read_bytes() * 4)

    def lose(job):
        job.wait_for_event("started", 60)
        text.unlink()
        pids = {e["worker"]: e["pid"] for e in job.run.lines(job.run.events) if e["event"] == "spawned"}
        os.kill(pids["0.1"], signal.SIGKILL)

    overrides = (f"data.path={text}", "run.respawns=1")
    case = Case("the data of a returning worker are missing", "2x2", overrides, steps=200, deaths=None, bound=120)
    outcome = runs.of(case, KIND, meanwhile=lose)
    assert [e["worker"] for e in outcome.all("refused")] == ["0.1"], explain(outcome)
    assert f"{text} does not exist" in outcome.all("refused")[0]["detail"] and outcome.all("given_up")


@pytest.mark.parametrize("shape", ["2x2", pytest.param("3x2", marks=slow)])
def test_a_kernel_that_cannot_run_here_ends_the_job_with_one_sentence(shape, sabotaged):
    says = "model.kernels: the kernels cannot run on cpu (OutOfResources: out of resource: shared memory"
    outcome, last = run(sabotaged, Case("an unfit kernel", shape, deaths=0, ends=says), unfit=True)
    assert outcome.code == 2 and says in last, explain(outcome)


def test_the_same_exception_at_the_start_of_two_peers_ends_the_job_with_its_traceback(sabotaged):
    case = Case("its start fails", "3x2", deaths=None, ends="both failed in the start of stage 1")
    outcome, last = run(sabotaged, case, start=1)
    assert outcome.code == 1 and last == "RuntimeError: sabotaged", explain(outcome)


@slow
def test_the_loss_of_a_stage_by_an_exception_names_the_exception(sabotaged):
    """With one pipeline no peer can confirm the exception, so the job retries the op once from the start."""
    says = "stage 1 has no live worker left"
    case = Case("its only worker fails", "1x2", deaths=None, ends=says)
    outcome, last = run(sabotaged, case, **{"raise": "ValueError", "stage": 1, "step": 3, "g": 1})
    assert outcome.code == 1 and says in last and last.endswith("death: ValueError: sabotaged"), explain(outcome)


TELEMETRY = ["Traces.died", "Traces.committed", "Recovery.announced", "Progress.step", "Lines.write"]


@pytest.mark.parametrize("where", [TELEMETRY, *(pytest.param([one], marks=slow) for one in TELEMETRY)], ids=", ".join)
def test_a_failure_of_the_telemetry_is_reported_once_and_does_not_end_the_job(where, sabotaged):
    case = Case("telemetry fails", "2x2", fails("3:0.1@backward"), deaths=None)
    outcome, _ = run(sabotaged, case, telemetry=where)
    expected = sabotaged.fault_free(case).summary["weights_sha256"]
    assert outcome.summary["weights_sha256"] == expected is not None, explain(outcome)
    said = [line for line in outcome.output.splitlines() if "telemetry failed in" in line]
    assert len(said) == len(set(said)) > 0 and "RuntimeError" in said[0], explain(outcome)


@pytest.mark.slow
def test_output_to_a_pager_that_does_not_read_delays_nothing(tmp_path):
    """As with `... | less` while no key is pressed. The job prints several times as much as fits into the pipe."""
    run, size = RunFolder(tmp_path / "run"), 4096
    quick = ["emulate=sleep", *(f"emulate.{op}=0" for op in "FIWO"), "run.standby=off"]
    command = [sys.executable, "-m", "recycle_pp.train", *Case("", "1x1", steps=300).arguments, *quick]
    environment = {**os.environ, "COLUMNS": "80"}
    with subprocess.Popen(
        [*command, f"run.dir={run.path}"], stdout=subprocess.PIPE, env=environment, pipesize=size
    ) as job:
        assert job.wait(240) == 0
        assert len(run.lines(run.metrics)) == 300 and run.summary.exists()
        assert size / 2 < len(job.stdout.read()) <= size, "the pipe must have been full"
