"""Uploads a checkpoint that is on this node's disk and not in the store, because its upload failed or was interrupted.
A separate process does this, for the reasons given in `survey`.

upload_late("s3://bucket/runs/mine", Path("runs/mine/checkpoints/step-000060"), settings.checkpoint) # raises StoreError

python -m recycle_pp.state.late_upload URL CHECKPOINT KEEP [--best]     # that process; prints a sentence and exits with
                                                                        # 2 if the upload fails
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from recycle_pp.config.settings import Checkpoint
from recycle_pp.linux.processes import die_with_parent
from recycle_pp.storage.store import Store, StoreError
from recycle_pp.telemetry.best_checkpoint import losses
from recycle_pp.telemetry.checkpoint_folders import step_of

from .checksum import ABOUT, TABLE
from .stored import StoredCheckpoints


def upload_late(url: str, checkpoint: Path, settings: Checkpoint) -> None:
    """Uploads and seals the checkpoint in this folder, unless the store at `url` has one with this number of steps.
    Blocks. Raises StoreError, with one sentence, if that fails."""
    command = [sys.executable, "-m", "recycle_pp.state.late_upload", url, str(checkpoint), str(settings.keep)]
    command += ["--best"] * settings.keep_best
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        printed = done.stdout.decode().strip()
        raise StoreError(printed or f"{checkpoint} could not be uploaded to {url}: exit code {done.returncode}")


def main(url: str, checkpoint: Path, keep: int, best: bool) -> int:
    try:
        _upload(StoredCheckpoints(Store(url)), checkpoint, keep, best)
    except (OSError, ValueError) as error:
        print(error)
        return 2
    return 0


def _upload(stored: StoredCheckpoints, checkpoint: Path, keep: int, best: bool) -> None:
    step = step_of(checkpoint.name)
    assert step is not None
    if stored.is_whole(step):
        return
    files: dict[str, list[int]] = {}
    for part in sorted(checkpoint.iterdir()):
        if part.is_dir():
            files |= stored.upload(step, part)
    about = json.loads((checkpoint / ABOUT).read_text())
    files = {file: of for file, of in files.items() if file in about["files"]}
    stored.seal(step, about, files, checkpoint / TABLE)
    stored.prune(step, keep, losses(checkpoint.parent.parent / "metrics.jsonl") if best else None)


if __name__ == "__main__":
    die_with_parent(os.getppid())
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), "--best" in sys.argv))
