"""Fetches datasets from the Hugging Face hub, once, into a folder that `documents.arrow` reads.

    local("hf://org/name:train")        # the folder; blocks while it is fetched. Without a split: train
    local("s3://bucket/chats.jsonl")    # the copy that `storage.local_copy` made, which must exist
    local("chats.jsonl")                # any other path stays as it is

The whole split is saved, so later starts need no network. If a process dies during a fetch, the next one fetches again.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
from pathlib import Path

from recycle_pp.storage.local_copy import cache_folder, place

PREFIX = "hf://"
_FETCH = (
    "import sys, datasets; found = datasets.load_dataset(sys.argv[1], split=sys.argv[2]); "
    "found.save_to_disk(sys.argv[3])"
)


def local(path: str) -> str:
    """The path on this machine.

    Raises ValueError if a dataset cannot be fetched.
    """
    if not path.startswith(PREFIX):
        return str(place(path))
    name, _, split = path.removeprefix(PREFIX).partition(":")
    folder = cache_folder("datasets") / hashlib.sha256(f"{name}:{split or 'train'}".encode()).hexdigest()[:32]
    if folder.exists():
        return str(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second process waits for the first
        if not folder.exists():
            _fetch(path, name, split or "train", folder)
    return str(folder)


def _fetch(path: str, name: str, split: str, folder: Path) -> None:
    """Fetches in a separate process, because this process may have disabled the hub (HF_HUB_OFFLINE)."""
    partial = f"{folder}.partial"
    command = [sys.executable, "-c", _FETCH, name, split, partial]
    done = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        why = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no reason given")
        needs = " (pip install -e '.[datasets]' in the clone of recycle_pp)" if "No module named" in why else ""
        raise ValueError(f"{path} cannot be fetched: {why}{needs}")
    os.rename(partial, folder)
