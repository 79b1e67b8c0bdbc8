"""Copies a run folder's small files to the run's store (`checkpoint.store`), for readers without the folder.

    copy = RunCopy(RunFolder("runs/mine"), Store("s3://bucket/runs/mine"))
    copy.update()                                     # uploads the files that have changed since the last call
    fetch(Store("s3://bucket/runs/mine"), folder)     # downloads the newest state of the run's files
    RunFolder(local("s3://bucket/runs/mine"))         # a temporary folder with these files, kept up to date

    python -m recycle_pp.telemetry.stored_run URL FOLDER      # downloads the files of a run that has ended

Checkpoints are not among these files; `recycle_pp.state.stored` uploads them. Objects below the store's URL:

    run/HOST-1a2b3c4d/config.yaml                  a file of the folder on this host
    run/HOST-1a2b3c4d/metrics.jsonl/000000000000   a piece of a file that grows, named by its offset in bytes

Without a shared folder, each coordinator of a job writes into the folder of its own host. `fetch` merges these copies.
Files that grow get the lines of all copies, and other files are taken from the newest coordinator.
"""

from __future__ import annotations

import atexit
import shutil
import socket
import sys
import tempfile
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from recycle_pp.storage.store import Absent, Object, Store, StoreError
from recycle_pp.wire.records import Term
from recycle_pp.wire.terms import EARLIER

from .heartbeat import Pulse
from .run_folder import RunFolder

ROOT = "run"
HEARTBEAT = "heartbeat.json"
GROWING = (".jsonl", ".log")
PIECE = 256 << 10  # bytes of a growing file in one object; the last piece is uploaded again whenever the file has grown
LARGEST = 64 << 20  # maximum bytes of any other file; larger ones are not copied
FOLDERS = ("", "logs", "traces", "hangs", "receipts")
REFRESH_SECONDS = 1.0  # between two downloads of the files
LOCAL_PATIENCE_SECONDS = 20.0  # how long `follow` and `main` retry a failing request


class RunCopy:
    """Copies one run folder to a store. Not thread-safe. A file that is deleted stays in the store."""

    def __init__(self, run: RunFolder, store: Store) -> None:
        self._run, self._store = run, store
        path = str(run.path.absolute()).encode()
        self._at = f"{ROOT}/{socket.gethostname()}-{zlib.crc32(path):08x}"
        self._sent: dict[str, tuple[int, int]] = {}  # file -> (size in bytes, time of its last change in ns)
        self._pieces: set[str] | None = None  # objects of this copy that are pieces of files

    def update(self) -> None:
        """Uploads new and changed files. If it raises StoreError, the next call uploads the rest."""
        if self._pieces is None:
            self._pieces = {path for path in self._store.list(self._at) if _is_piece(path)}
        for name in files(self._run.path):
            with suppress(FileNotFoundError):  # the file was deleted or replaced in the meantime
                self._file(name, self._pieces)

    def _file(self, name: str, pieces: set[str]) -> None:
        path, at = self._run.path / name, f"{self._at}/{name}"
        status = path.stat()
        size, before = status.st_size, self._sent.get(name, (0, 0))
        if before == (size, status.st_mtime_ns):
            return
        if name.endswith(GROWING):
            if size < before[0]:  # a resume has truncated the file
                before = (0, 0)
            with path.open("rb") as file:
                for start in range(before[0] // PIECE * PIECE, size, PIECE):
                    file.seek(start)
                    self._store.put(_piece(at, start), file.read(min(PIECE, size - start)))
                    pieces.add(_piece(at, start))
            old = {piece for piece in pieces if piece.startswith(f"{at}/") and piece >= _piece(at, size)}
            self._store.delete(sorted(old))
            pieces -= old
        elif size <= LARGEST:
            self._store.put(at, path.read_bytes())
        self._sent[name] = size, status.st_mtime_ns


def fetch(store: Store, folder: Path) -> None:
    """Writes the run's files to `folder`. Replaces each file as a whole, but keeps the lines of files that grow.

    Raises Absent if the store has no run, and StoreError if a request fails.
    """
    with tempfile.TemporaryDirectory(prefix="recycle-run-") as objects:
        _Download(store, folder, Path(objects), keeps=True).update()


class _Download:
    """Downloads a run's files. Later updates download only what has changed: otherwise, in a run with many files, the
    heartbeat would arrive so rarely that the job counts as silent."""

    def __init__(self, store: Store, folder: Path, objects: Path, only: str | None = None, keeps: bool = False) -> None:
        """
        folder:  for the run's files
        objects: for the objects of the store
        only:    name of the only file to download; None: all files
        keeps:   whether lines stay that are in the folder and not in the store
        """
        self._store, self._folder, self._objects, self._only, self._keeps = store, folder, objects, only, keeps
        self._here: dict[str, Object] = {}  # object -> its version in the folder `objects`
        self._written: dict[str, list[list[tuple[str, Object]]]] = {}  # file -> its objects in each copy

    def update(self) -> None:
        """Raises Absent or StoreError like `fetch`. The next call then downloads the rest."""
        found = self._store.objects(ROOT)
        copies = defaultdict[str, dict[str, list[str]]](dict)  # copy (HOST-1a2b3c4d) -> file -> its objects
        for path in sorted(found):
            _, copy, name = path.split("/", 2)
            file = name.rpartition("/")[0] if _is_piece(name) else name
            copies[copy].setdefault(file, []).append(path)
        if not copies:
            raise Absent(f"{self._store.url} contains no run")
        ordered = sorted(copies.values(), key=lambda copy: self._term(copy, found))
        names = {file for copy in ordered for file in copy if self._only in (None, file)}
        for file in sorted(names, key=lambda file: (file != HEARTBEAT, file)):
            objects = [[(path, found[path]) for path in copy[file]] for copy in ordered if file in copy]
            if self._written.get(file) != objects:
                self._write(file, [b"".join(self._get(*each) for each in of) for of in objects])
                self._written[file] = objects

    def _write(self, file: str, contents: list[bytes]) -> None:
        target = self._folder / file
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}")
        if self._keeps and target.exists():
            contents = [target.read_bytes(), *contents]
        temporary.write_bytes(_joined(contents) if file.endswith(GROWING) else contents[-1])
        temporary.replace(target)

    def _get(self, path: str, version: Object) -> bytes:
        here = self._objects / path
        if self._here.get(path) != version:
            here.parent.mkdir(parents=True, exist_ok=True)
            here.write_bytes(self._store.get(path))
            self._here[path] = version
        return here.read_bytes()

    def _term(self, copy: dict[str, list[str]], found: dict[str, Object]) -> int:
        """The term of the newest coordinator that has written into this copy. copy: file -> its objects."""
        try:
            signs = [self._get(path, found[path]) for path in copy[HEARTBEAT]]
            return max(msgspec.json.decode(sign, type=_Termed).term for sign in signs)
        except (KeyError, Absent, msgspec.MsgspecError):
            return EARLIER


def local(name: str) -> str:
    """The folder of a run: `name` itself, or a temporary folder (`follow`) if `name` is the URL of a store."""
    return str(follow(name)) if is_url(name) else name


def follow(url: str, only: str | None = None) -> Path:
    """A temporary folder with the run's files, which a thread keeps up to date until this process ends.

    only: name of the only file in it; None: all files

    Raises Absent or StoreError like `fetch`.
    """
    store = Store(url, LOCAL_PATIENCE_SECONDS)
    temporary = tempfile.mkdtemp(prefix="recycle-run-")
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    folder = Path(temporary) / store.url.rpartition("/")[2]
    folder.mkdir()  # the store may lack the only file
    download = _Download(store, folder, Path(temporary) / ".objects", only)
    download.update()
    RunFolder(folder).copy.touch()
    threading.Thread(target=_refresh, args=(download,), name="store", daemon=True).start()
    return folder


def is_url(name: str) -> bool:
    return "://" in name


def files(folder: Path) -> Iterator[str]:
    """Names of the files to copy, relative to the run folder."""
    for inner in FOLDERS:
        for path in sorted((folder / inner).glob("*")):
            if path.is_file() and not path.name.startswith("."):
                yield str(path.relative_to(folder))


def main(url: str, folder: str) -> int:
    """Downloads the files of a run that has ended to `folder`, unless the folder is as new. Returns the exit code.

    The exit code is 0 even if the store lacks these files, and 2 after printing a sentence about an error.
    """
    try:
        run, stored = RunFolder(folder), RunFolder(follow(url, only=HEARTBEAT))
        if run.config.exists() and run.newest_term >= stored.newest_term:
            return 0
        life = Pulse(stored).look()
        if life.verdict == "alive":
            print(f"checkpoint.store={url} belongs to a job that still runs: {life.proof}")
            return 2
        fetch(Store(url, LOCAL_PATIENCE_SECONDS), Path(folder))
        run.heartbeat.unlink(missing_ok=True)
    except Absent:  # a run of an earlier version, which stored only checkpoints
        return 0
    except (StoreError, OSError) as error:
        print(error)
        return 2
    return 0


def _refresh(download: _Download) -> None:
    while True:
        time.sleep(REFRESH_SECONDS)
        with suppress(StoreError, OSError):
            download.update()


class _Termed(msgspec.Struct):
    term: Term = EARLIER


def _joined(contents: list[bytes]) -> bytes:
    """The complete lines of all copies, oldest copy first, without repeating lines of an older copy."""
    seen, joined = set[bytes](), list[bytes]()
    for content in contents:
        lines = content.splitlines(keepends=True)
        new = [line for line in lines if line.endswith(b"\n") and line not in seen]
        joined += new
        seen.update(new)
    return b"".join(joined)


def _piece(path: str, start: int) -> str:
    return f"{path}/{start:012d}"


def _is_piece(name: str) -> bool:
    file, _, last = name.rpartition("/")
    return file.endswith(GROWING) and last.isdigit()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
