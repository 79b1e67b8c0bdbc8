"""Finds the newest checkpoint in a store, in a separate process, so that supervisors do not import obstore and are not
blocked by a folder that hangs.

survey("s3://bucket/runs/mine", seconds=20, probe=True)    # Survey(step=40, damaged={60: "..."}); raises StoreError

python -m recycle_pp.state.survey URL SECONDS FOLDER [--probe]    # that process; prints the survey as JSON, or a
                                                                  # sentence and exits with 2
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec

from recycle_pp.storage.store import Store, StoreError
from recycle_pp.telemetry.checkpoint_folders import name

from .stored import StoredCheckpoints

EXTRA_SECONDS = 60.0  # added for the start of Python on a busy machine, and for requests that are answered slowly


class Survey(msgspec.Struct):
    """The newest checkpoints in a store.

    step     number of steps in the newest complete checkpoint; 0 if there is none
    damaged  number of steps in a newer checkpoint -> description of its damage
    copied   whether the run folder has a copy of the newest complete checkpoint
    """

    step: int = 0
    damaged: dict[int, str] = {}
    copied: bool = False


def survey(url: str, seconds: float, probe: bool = False, folder: Path | None = None) -> Survey:
    """The newest checkpoints in the store at `url`. Blocks.

    seconds  seconds for which requests are repeated if the store does not answer
    probe    whether to try every operation that a job needs from the store, see `Store.probe`
    folder   run.dir/checkpoints; only needed for `Survey.copied`

    Raises StoreError, with one sentence, if the store cannot be used.
    """
    command = [sys.executable, "-m", "recycle_pp.state.survey", url, str(seconds), str(folder or "")]
    command += ["--probe"] * probe
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, timeout=seconds + EXTRA_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise StoreError(f"{url} did not answer within {seconds + EXTRA_SECONDS:.0f} s") from None
    if done.returncode:
        raise StoreError(done.stdout.decode().strip() or f"{url} could not be read: exit code {done.returncode}")
    return msgspec.json.decode(done.stdout, type=Survey)


def main(url: str, seconds: float, probe: bool, folder: Path | None = None) -> int:
    try:
        store = Store(url, seconds)
        if probe:
            store.probe()
        stored = StoredCheckpoints(store)
        found = _look(stored)
        found.copied = folder is not None and stored.is_copy(found.step, folder / name(found.step))
    except StoreError as error:
        print(error)
        return 2
    print(msgspec.json.encode(found).decode())
    return 0


def _look(stored: StoredCheckpoints) -> Survey:
    found = Survey()
    for step in reversed(stored.steps()):
        damage = stored.damage(step)
        if damage is None:
            found.step = step
            break
        found.damaged[step] = damage
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2]), "--probe" in sys.argv, Path(sys.argv[3]) if sys.argv[3] else None))
