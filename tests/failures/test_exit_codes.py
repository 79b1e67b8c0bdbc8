"""A job under the real torchrun ends with the exit codes in docs/exit-codes.md, and its last line gives the reason.

Each rank runs `python -m recycle_pp.train` in a script that records its exit code, because torchrun does not show it
after a signal.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recycle_pp.linux.processes import die_with_parent
from recycle_pp.telemetry.run_folder import RunFolder

pytestmark = [pytest.mark.timeout(400), pytest.mark.torchrun]
TORCHRUN = Path(sys.executable).with_name("torchrun")
TINY = ["model=tiny", "run.validate_every=0"]
TWO = ["parallel.pipelines=1", "parallel.stages=2"]
RANK = """
import os, pathlib, runpy
leave = os._exit
def keep_and_leave(code):
    pathlib.Path(os.environ["CODES"], os.environ["RANK"]).write_text(str(code))
    leave(code)
os._exit = keep_and_leave
runpy.run_module("recycle_pp.train", run_name="__main__", alter_sys=True)
"""


class Launch:
    """One torchrun agent. Each rank's output goes to a file."""

    def __init__(self, folder: Path, workers: int, arguments: list[str]) -> None:
        self.run, self._codes, self._logs = RunFolder(folder / "run"), folder / "codes", folder / "logs"
        self._codes.mkdir()
        script = folder / "rank.py"
        script.write_text(RANK)
        parent = os.getpid()
        self.torchrun = subprocess.Popen(
            [TORCHRUN, f"--nproc-per-node={workers}", f"--log-dir={self._logs}", "--redirects=3", script,
             *TINY, *arguments, f"run.dir={self.run.path}"],
            env={**os.environ, "CODES": str(self._codes), "OMP_NUM_THREADS": "1"},
            cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            preexec_fn=lambda: die_with_parent(parent),
        )  # fmt: skip

    def end(self) -> str:
        """Waits for the end of torchrun. Returns its own output."""
        return self.torchrun.communicate(timeout=300)[1]

    def wait_for_step(self, step: int) -> None:
        while all(line["step"] < step for line in self.run.lines(self.run.metrics)):
            assert self.torchrun.poll() is None, self.end()
            time.sleep(0.05)

    def codes(self) -> dict[int, int]:
        return {int(path.name): int(path.read_text()) for path in self._codes.iterdir()}

    def printed(self, rank: int) -> list[str]:
        """The lines of a rank's standard output, followed by those of its standard error."""
        (folder,) = self._logs.glob(f"*/attempt_0/{rank}")
        return [line for name in ("stdout.log", "stderr.log") for line in (folder / name).read_text().splitlines()]


def summary(text: str) -> list[tuple[int, int, str]]:
    """The failures that torchrun lists: (rank, exit code, text shown as its traceback)."""
    found = re.findall(r"rank +: (\d+) .*\n +exitcode +: (-?\d+) .*\n.*\n +traceback : (.*)", text)
    return [(int(rank), int(code), sentence) for rank, code, sentence in found]


@pytest.mark.slow  # quick counterpart: tests/recycle_pp/test_counting.py
def test_a_finished_job_exits_with_0(tmp_path):
    job = Launch(tmp_path, 2, [*TWO, "run.steps=2"])
    assert summary(job.end()) == []
    assert job.torchrun.returncode == 0
    assert job.codes() == {0: 0, 1: 0}


def test_a_mistake_exits_with_2_and_its_sentence_is_the_last_line_and_in_torchruns_summary(tmp_path):
    job = Launch(tmp_path, 4, ["parallel=2x2", "run.stepz=3"])
    sentence = "run.stepz is not a configuration key; did you mean run.steps?"
    assert summary(job.end()) == [(0, 2, sentence)]
    assert job.torchrun.returncode == 1
    assert job.printed(0) == [f"recycle_pp: {sentence}"]
    assert [job.printed(rank) for rank in (1, 2, 3)] == [[], [], []]
    assert not job.run.path.exists()


@pytest.mark.slow  # quick counterpart: test_endings.py
def test_a_stopped_job_exits_with_1_and_the_reason_is_in_torchruns_summary(tmp_path):
    job = Launch(tmp_path, 2, [*TWO, "run.steps=50", "+fail_at=1:0.1"])
    ((rank, code, sentence),) = summary(job.end())
    assert (rank, code) == (0, 1)
    assert "stage 1" in sentence
    assert job.printed(0)[-1].endswith(sentence)
    assert job.codes() == {0: 1, 1: 0}


@pytest.mark.slow  # quick counterpart: the signals to `recycle train` in tests/recycle_pp/test_cli.py
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_after_a_signal_to_torchrun_the_exit_code_is_128_plus_its_number(number, code, tmp_path):
    job = Launch(tmp_path, 2, [*TWO, "run.steps=100000"])
    job.wait_for_step(1)
    job.torchrun.send_signal(number)
    job.end()
    assert job.torchrun.returncode == 1, "the exit code of torchrun itself"
    assert job.codes() == {0: code, 1: 0}
    assert "the newest checkpoint is" in job.printed(0)[-1]


def test_run_in_process_torchrun_prints_the_sentence_last_and_returns_the_code_of_the_rank(tmp_path):
    script = "import sys; from recycle_pp.supervisor.torchrun import run_torchrun; sys.exit(run_torchrun(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", script, "--nproc-per-node=2", "-m", "recycle_pp.train", *TWO, "run.stepz=3"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    sentence = "recycle_pp: run.stepz is not a configuration key; did you mean run.steps?"
    assert done.stderr.splitlines()[-1] == sentence
    assert "Traceback" not in done.stderr


def test_torchruns_error_file_has_the_format_of_torchs_own_record(tmp_path, monkeypatch):
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    from recycle_pp.telemetry.failure import fail

    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    fail("all is lost")
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(tmp_path / "error.json"))
    assert failure.message["message"] == "all is lost"
    assert abs(failure.timestamp - time.time()) < 60
