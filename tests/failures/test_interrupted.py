"""SIGKILL at any instant of an export: nothing is damaged, and the next try works."""

import os
import shutil
import signal
import time

import pytest

from recycle_pp import export


@pytest.fixture(scope="module")
def finished_run(zygote, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "run"
    with zygote.run(["parallel=2x2", "model=tiny", "run.steps=3", "run.validate_every=0", f"run.dir={folder}"]) as job:
        assert job.wait(120) == 0, job.output
    return folder


def test_an_export_killed_at_any_instant_leaves_a_whole_folder_or_none(finished_run, tmp_path):
    def attempt(out, until):
        """The exit code of an export in a process of its own, killed after `until` seconds; how long it ran."""
        begun, pid = time.monotonic(), os.fork()
        if pid == 0:
            os._exit(export.main([str(finished_run), str(out)]))
        while (
            time.monotonic() < begun + until and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        ):
            time.sleep(0.001)
        os.kill(pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), time.monotonic() - begun

    assert export.main([str(finished_run), str(tmp_path / "whole")]) == 0  # also imports what the attempts need
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
    assert killed >= 10
    assert attempt(tmp_path / "out", 60)[0] == 0
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]
