"""Admits a job to the islands in a store, before its workers start. Runs in a separate process, as `state.survey` does.

    part = admitted(settings, done=0)         # the part of the data that this island reads; raises StoreError

    python -m recycle_pp.islands.admission    # that process; reads the settings from standard input

The first island writes `run.json` with the settings that all islands must share. The name of an island keeps its part
of the data forever, so no two islands read the same sample.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from typing import Any

from recycle_pp.config.loading import flat, load
from recycle_pp.config.settings import Settings
from recycle_pp.storage.store import Absent, Store, StoreError

from .objects import RUN, lease_path, number_path, owner, owner_in, past_path
from .rounds import GONE_SECONDS

STORE_SECONDS = 20.0  # how long to retry requests to a store that does not answer
RESUME_SECONDS = 300.0  # longer limit for a resumed run, because its store has answered before
EXTRA_SECONDS = 60.0  # for the start of Python on a busy machine
# Model settings that do not affect the size of any tensor. An older version did not write them into run.json.
UNSEEN = ("model.rope_theta", "model.rope_scaling", "model.norm_eps", "model.lora.alpha")
SHARED = (  # settings that must be the same on all islands, because theta or its meaning depends on them
    *(f"islands.{key}" for key in ("steps", "fragments", "lr", "momentum", "bits", "parts")),
    *(
        f"model.{key}"
        for key in ("kind", "layers", "width", "heads", "kv_heads", "head_dim", "ffn", "vocabulary", "init", "tied")
    ),
    *UNSEEN,
    "optimizer.name",
    "run.seed",
)


def admitted(settings: Settings, done: int) -> int:
    """The part of the data that this island reads. Blocks.

    done: number of steps in the checkpoint from which the job resumes; 0 without one

    Raises StoreError, with one sentence, if the store cannot be used, or if this island does not match the others.
    """
    command, seconds = [sys.executable, "-m", "recycle_pp.islands.admission"], _patience(done) + EXTRA_SECONDS
    given = json.dumps([asdict(settings), done])
    url = settings.islands.store
    try:
        found = subprocess.run(command, input=given, stdout=subprocess.PIPE, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        raise StoreError(f"{url} did not answer within {seconds:.0f} s") from None
    if found.returncode:
        raise StoreError(found.stdout.strip() or f"{url} could not be read: exit code {found.returncode}")
    return int(found.stdout)


def admit(store: Store, settings: Settings, done: int) -> int:
    """Does the work of the separate process, see `admitted`."""
    name, islands = str(settings.islands.name), settings.islands
    store.probe()
    _compare(store, name, shared(settings))
    number = _number(store, name, islands.parts)
    here = owner(settings.run.dir)
    place = lease_path(name)
    holder, modified = None, None
    try:
        modified = store.head(place).modified
        holder = owner_in(store.get(place))
    except Absent:
        pass
    store.put(f"clock/{name}", b"")
    age = store.head(f"clock/{name}").modified - (modified or 0.0)
    if holder not in (None, here) and age <= GONE_SECONDS:
        raise StoreError(
            f"islands.name={name} is used by another job in {store.url}, last seen {age:.0f} s ago; choose a different "
            f"name, or wait {GONE_SECONDS - age:.0f} s if that job has ended"
        )
    # Only a delta proves that the island has taken part. A checksum does not, because every island that applies a round
    # uploads one.
    deltas = any(f"/{name}/" in path and path.endswith(".delta") for path in store.list("rounds"))
    taken_part = deltas or past_path(name) in store.list("past")
    if not done and taken_part:
        raise StoreError(
            f"islands.name={name} has taken part in rounds in {store.url}, but this run begins at step 0; continue "
            "its run from a checkpoint with run.resume=true, or choose a different name if it has none"
        )
    lease = json.dumps({"name": name, "owner": here, "step": done, "round": 0}).encode()
    if modified is None:
        store.put_if_absent(place, lease)
    else:
        store.put(place, lease)
    # Another job may have replaced the lease since it was read. If it does so later, `Leader.renew` notices.
    if owner_in(store.get(place)) not in (None, here):
        raise StoreError(
            f"islands.name={name} is used by another job in {store.url}, which has started at the same time; choose a "
            "different name"
        )
    return number


def shared(settings: Settings) -> dict[str, Any]:
    values = flat(asdict(settings))
    return {key: values[key] for key in SHARED}


def _compare(store: Store, name: str, mine: dict[str, Any]) -> None:
    content = json.dumps({"island": name, "settings": mine}).encode()
    if store.put_if_absent(RUN, content):
        return
    try:
        first = json.loads(store.get(RUN))
        # run.json lacks the settings that did not exist in the version that wrote it.
        missing = shared(Settings()) | {key: mine[key] for key in UNSEEN}
        island, theirs = str(first["island"]), missing | first["settings"]
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(f"{store.url}/{RUN} is damaged: {error}") from None
    for key, value in mine.items():
        if theirs[key] != value:
            raise StoreError(
                f"{key} is {theirs[key]} in island {island} and {value} in island {name}; all islands in "
                f"{store.url} need the same value"
            )


def _number(store: Store, name: str, parts: int) -> int:
    """The number of the island, which is also its part of the data."""
    for number in range(parts):
        if store.put_if_absent(number_path(number), name.encode()):
            return number
    raise StoreError(
        f"islands.parts={parts} islands have already taken part in {store.url}, so there are no data left for "
        f"island {name}"
    )


def _patience(done: int) -> float:
    return RESUME_SECONDS if done else STORE_SECONDS


def main() -> int:
    data, done = json.load(sys.stdin)
    settings: Settings = load(data)
    try:
        print(admit(Store(str(settings.islands.store), _patience(done)), settings, done))
    except StoreError as error:
        print(error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
