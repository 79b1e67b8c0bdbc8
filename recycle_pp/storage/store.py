"""Objects in S3, Google Cloud Storage, Azure Blob Storage, or in a folder.

    store = Store("s3://bucket/runs/mine")         # also gs://, az://, file:///folder, /folder
    store.put("a/b.json", b"{}"); store.get("a/b.json")
    store.put_file("a/data", path); store.get_file("a/data", path)     # in pieces, several at a time
    store.put_if_absent("seal", content)           # True for exactly one content
    store.list("a/")                               # {"a/b.json": 2, "a/data": 1048576}: paths and sizes in bytes
    store.probe()                                  # before a job starts: StoreError in one sentence

Paths are relative to the URL. An object appears as a whole or not at all, and a reader sees no part of a put that was
killed. Keys, region and address come from the environment, as the clouds' own tools read it: AWS_ACCESS_KEY_ID,
GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, and others (docs/storage.md).

All methods block and may be called from any thread. They raise `Absent` if there is no such object, and `StoreError`
if the store cannot be reached or refuses. A request that fails by a broken connection, a time-out or an answer 5xx is
repeated for `patience` seconds.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

PATIENCE_SECONDS = 120.0
PIECE = 8 << 20  # bytes of a file that one request transfers
MOST_PIECES = 9000  # of a file; S3 allows 10,000
TOGETHER = 4  # pieces of one file in transfer, so a file takes TOGETHER * PIECE bytes of memory
REQUEST_SECONDS = 120.0  # limit of one request: a piece needs 70 kB/s

_T = TypeVar("_T")


class StoreError(ValueError):
    """The store cannot be reached or refuses. The text is one sentence for users, which names the store."""


class Absent(StoreError):
    """There is no such object."""


class Store:
    def __init__(self, url: str, patience: float = PATIENCE_SECONDS) -> None:
        """
        url       s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX, file:///FOLDER or /FOLDER
        patience  seconds for which a failing request is repeated

        Raises StoreError if the package obstore is missing, the URL is wrong, or the folder cannot be made.
        """
        self.url = url.rstrip("/")
        try:
            import obstore
            from obstore.exceptions import AlreadyExistsError, BaseError
            from obstore.store import LocalStore, from_url
        except ImportError:
            raise StoreError(
                f"{self.url} needs the package obstore; pip install -e '.[store]' in the clone of recycle_pp"
            ) from None
        self._obstore: Any = obstore
        self._exists, self._errors = AlreadyExistsError, (BaseError, OSError)

        def connect() -> Any:
            if folder := folder_of(self.url):
                return LocalStore(folder, automatic_cleanup=True, mkdir=True)
            return from_url(
                self.url,
                client_options={
                    "timeout": timedelta(seconds=REQUEST_SECONDS),
                    "connect_timeout": timedelta(seconds=5),
                    "allow_http": True,  # for an endpoint that the user gives as http://
                },
                retry_config={
                    "max_retries": 1000,
                    "retry_timeout": timedelta(seconds=patience),
                    "backoff": {"max_backoff": timedelta(seconds=5)},
                },
            )

        self._store = self._call(connect)

    def get(self, path: str) -> bytes:
        return bytes(self._call(lambda: self._obstore.get(self._store, path).bytes(), path))

    def get_range(self, path: str, start: int, length: int) -> bytes:
        """Fewer than `length` bytes if the object ends before."""
        return bytes(self._call(lambda: self._obstore.get_range(self._store, path, start=start, length=length), path))

    def get_file(self, path: str, to: Path, progress: Callable[[], None] = lambda: None) -> None:
        """Writes the object to the file `to`. Calls `progress` after each piece."""
        size = self.size(path)
        with to.open("wb") as file, ThreadPoolExecutor(TOGETHER) as pool:
            starts = range(0, size, PIECE)
            for at in range(0, len(starts), TOGETHER):
                some = starts[at : at + TOGETHER]
                for piece in pool.map(lambda start: self.get_range(path, start, min(PIECE, size - start)), some):
                    file.write(piece)
                    progress()

    def put(self, path: str, content: bytes) -> None:
        self._call(lambda: self._obstore.put(self._store, path, content), path)

    def put_file(self, path: str, file: Path) -> None:
        piece = max(PIECE, -(-file.stat().st_size // MOST_PIECES))
        self._call(lambda: self._obstore.put(self._store, path, file, chunk_size=piece, max_concurrency=TOGETHER), path)

    def put_if_absent(self, path: str, content: bytes) -> bool:
        """Whether the object now has this content. False: it existed with another one, and is unchanged."""
        try:
            self._call(lambda: self._obstore.put(self._store, path, content, mode="create"), path)
        except FileExistsError:  # perhaps by this very call, if the answer to its first request was lost
            return self.get(path) == content
        return True

    def size(self, path: str) -> int:
        """In bytes."""
        return int(self._call(lambda: self._obstore.head(self._store, path), path)["size"])

    def list(self, folder: str = "") -> dict[str, int]:
        """Path and size in bytes of each object below `folder`. Stores may leave out objects that are seconds old."""
        found = self._call(lambda: [*self._obstore.list(self._store, folder or None)])
        return {item["path"]: item["size"] for items in found for item in items}

    def folders(self, folder: str = "") -> set[str]:
        """Names of the folders in `folder`. Stores may leave out new ones, as `list` does."""
        found = self._call(lambda: self._obstore.list_with_delimiter(self._store, folder or None))
        return {prefix.rsplit("/", 1)[-1] for prefix in found["common_prefixes"]}

    def delete(self, paths: Iterable[str]) -> None:
        """Objects that do not exist are no error."""
        every = list(paths)
        try:
            self._call(lambda: self._obstore.delete(self._store, every) if every else None)
        except Absent:  # some stores then keep the other ones
            for path in every if len(every) > 1 else []:
                self.delete([path])

    def probe(self) -> None:
        """Writes, reads and deletes a small object. Raises StoreError if any of it fails, or if the store ignores the
        condition of `put_if_absent`."""
        path = f"probe-{secrets.token_hex(8)}"
        try:
            self.put_if_absent(path, b"1")
            if self.put_if_absent(path, b"2"):
                raise StoreError(f"{self.url} overwrites objects that exist: it has no conditional puts")
            self.folders()
            self.delete([path])
        except StoreError as error:
            raise StoreError(str(error).replace(f"/{path}", "")) from None

    def _call(self, request: Callable[[], _T], path: str = "") -> _T:
        started = time.monotonic()
        where = f"{self.url}/{path}" if path else self.url
        try:
            return request()
        except self._exists:
            raise FileExistsError(where) from None
        except FileNotFoundError as error:
            text = str(error)
            if "NoSuchBucket" not in text:
                raise Absent(f"{where} does not exist") from None
            raise StoreError(f"{where}: {in_words(text)}") from None
        except self._errors as error:
            after = time.monotonic() - started
            tried = f", tried for {after:.0f} s" if after >= 1 else ""
            raise StoreError(f"{where}: {in_words(str(error))}{tried}") from None


def folder_of(url: str) -> Path | None:
    """The folder that a URL names; None if it names a store of objects."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return Path(url)
    return Path(rest) if scheme == "file" else None


def in_words(error: str) -> str:
    """The reason in an error of obstore, as a part of a sentence. Such an error has several lines and the server's
    answer."""
    code, message = (re.search(f"<{tag}>(.*?)</{tag}>", error, re.DOTALL) for tag in ("Code", "Message"))
    if code and message:
        return f"{code[1]} ({' '.join(message[1].split()).rstrip('.')})"
    if status := re.search(r"status code: (\d{3}[\w ]*)", error):
        return f"the server answered {status[1].strip()}"
    if "error sending request" in error:
        return "the server cannot be reached"
    return " ".join(error.split("\n\nDebug source")[0].split()).removeprefix("Generic ").rstrip(".")
