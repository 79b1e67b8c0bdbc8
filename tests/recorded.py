"""One recorded job that many tests read. The first pytest process that needs it runs it, once.

    def test_the_report_has_the_death(recorded):
        report(recorded.run)

The job has four workers, with emulated compute. Worker 1.1 is killed in step 4 and returns. The job validates, writes a
checkpoint at its end, passes its events to a command, and logs to TensorBoard and W&B if they are installed. Tests must
not change its folder.
"""

import importlib.util
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from recycle_pp.telemetry.run_folder import RunFolder
from tests.once import once

STEPS = 60
SECRET = "the secret of the recorded job, which no command may see"


@dataclass(frozen=True)
class Recorded:
    path: str  # of the run folder
    output: str  # of its supervisors
    passed_on: str  # events received by the command of run.on_event
    environment: str  # of that command

    @property
    def run(self) -> RunFolder:
        return RunFolder(self.path)


@pytest.fixture(scope="session")
def recorded(request, shared_folder):
    return once(
        shared_folder, "recorded", lambda: _record(request.getfixturevalue("zygote"), shared_folder / "recorded")
    )


def _record(zygote, folder: Path) -> Recorded:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    exporters = [f"log.{name}=true" for name in ("tensorboard", "wandb") if importlib.util.find_spec(name) is not None]
    arguments = [
        "parallel=2x2", "model=tiny", f"run.steps={STEPS}", "run.validate_every=5", "emulate=sleep",
        "+fail_at=4:1.1@backward", "+rejoin_at=6:1.1", f"run.dir={folder / 'run'}", *exporters,
        f"run.on_event=cat >> {folder}/events; env >> {folder}/environment",
    ]  # fmt: skip
    environment = {"RECYCLE_TOKEN": SECRET, "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    with zygote.run(arguments, environment=environment) as job:
        assert job.wait(120) == 0, job.output
        output = job.output
    return Recorded(str(folder / "run"), output, *((folder / n).read_text() for n in ("events", "environment")))
