"""A SIGKILL at any instant of a resume or an export damages nothing, and the next attempt succeeds."""

import contextlib
import os
import random
import shutil
import signal
import time

import pytest

from recycle_pp import export

from .harness import Case, explain
from .test_surroundings import check_same_weights, interrupted, resumed

STEPS = 200


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.timeout(600)
def test_a_resume_killed_repeatedly_at_any_instant_ends_with_the_same_weights(seed, zygote, runs, tmp_path):
    chance, folder = random.Random(f"resume {seed}"), tmp_path / "run"
    interrupted(runs, folder, steps=STEPS)
    case = resumed("2x2", folder, STEPS)
    for kill in range(8):
        with zygote.run(case.arguments) as job:
            # Odd kills hit the training. Even ones hit the start, when the job reads the folder, truncates files or
            # loads the checkpoint.
            if kill % 2:
                wait_for_another_start(job)
            time.sleep(chance.uniform(0.0, 0.3 if kill % 2 else 1.0))
            killed = [job.pid, *job.supervisors()]
            assert len(killed) > 1, job.output
            for pid in killed:
                with contextlib.suppress(ProcessLookupError):  # this supervisor has ended with the launcher
                    os.kill(pid, signal.SIGKILL)
    outcome = runs.of(case, "killed resumes")
    check_same_weights(runs, outcome, Case("no worker dies", "2x2", steps=STEPS))
    assert [line["step"] for line in outcome.metrics] == [*range(STEPS)], explain(outcome)
    assert list(outcome.samples) == [*range(STEPS)], explain(outcome)


def wait_for_another_start(job):
    """Waits for a `started` event of this job. Earlier jobs of the run have written such events, too."""

    def starts():
        return sum(event["event"] == "started" for event in job.run.lines(job.run.events))

    before, deadline = starts(), time.monotonic() + 60
    while starts() <= before:
        assert time.monotonic() < deadline, job.output
        time.sleep(0.02)


@pytest.fixture(scope="module")
def finished_run(zygote, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "run"
    with zygote.run(["parallel=2x2", "model=tiny", "run.steps=3", "run.validate_every=0", f"run.dir={folder}"]) as job:
        assert job.wait(120) == 0, job.output
    return folder


def test_an_export_killed_at_any_instant_leaves_a_whole_folder_or_none(finished_run, tmp_path):
    def attempt(out, until):
        """Runs an export in a new process and kills it after `until` seconds. Returns (exit code, duration)."""
        begun, pid = time.monotonic(), os.fork()
        if pid == 0:
            os._exit(export.main([str(finished_run), str(out)]))
        while (
            time.monotonic() < begun + until and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        ):
            time.sleep(0.001)
        os.kill(pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), time.monotonic() - begun

    # This imports the modules in advance for all attempts.
    assert export.main([str(finished_run), str(tmp_path / "whole")]) == 0
    code, takes = attempt(tmp_path / "out", 60)
    assert code == 0
    shutil.rmtree(tmp_path / "out")
    whole = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    killed = 0
    for instant in range(25):
        out = tmp_path / "out"
        code, _ = attempt(out, takes * instant / 25)
        killed += code == -signal.SIGKILL
        assert out.exists() == (code == 0) or code == -signal.SIGKILL
        if out.exists():
            assert {path.name: path.read_bytes() for path in out.iterdir()} == whole
            shutil.rmtree(out)
    assert killed >= 3, "too few exports were killed: the first one took much longer than the others"
    assert attempt(tmp_path / "out", 60)[0] == 0
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]
