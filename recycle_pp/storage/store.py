"""Objects in S3, Google Cloud Storage, Azure Blob Storage, or in a folder.

    store = Store("s3://bucket/runs/mine")         # also gs://, az://, file:///folder, /folder
    store.put("a/b.json", b"{}"); store.get("a/b.json")
    store.put_file("a/data", path); store.get_file("a/data", path)     # in pieces, several at a time
    store.put_if_absent("seal", content)           # False if the object exists with different content
    store.list("a/")                               # {"a/b.json": 2, "a/data": 1048576}: paths and sizes in bytes
    store.probe()                                  # call it before a job starts; raises StoreError if it fails

Paths are relative to the URL. An object appears as a whole or not at all, and a reader sees no part of a put that was
killed. Keys, region and address come from the environment, as the clouds' own tools read it: AWS_ACCESS_KEY_ID,
GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, and others (docs/storage.md).

All methods block and may be called from any thread. They raise `Absent` if there is no such object, and `StoreError` if
the store cannot be reached or refuses the request. A request that fails because of a broken connection, a time-out or
a 5xx answer is retried for `patience` seconds.
"""

from __future__ import annotations

import re
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

PATIENCE_SECONDS = 120.0
PIECE = 8 << 20  # bytes of a file that one request transfers
MOST_PIECES = 9000  # maximum number of pieces of a file; S3 allows 10,000
TOGETHER = 4  # pieces of one file in transfer at a time; they need TOGETHER * PIECE bytes of memory
REQUEST_SECONDS = 120.0  # time limit of one request; to meet it, a piece needs 70 kB/s

_T = TypeVar("_T")


class StoreError(ValueError):
    """The store cannot be reached or refuses the request. The text is one sentence for users, which names the store."""


class Absent(StoreError):
    """There is no such object."""


class Object(NamedTuple):
    """An object. size: bytes; version: changes with the content; modified: time of the last change, in seconds."""

    size: int
    version: str
    modified: float


class Store:
    def __init__(self, url: str, patience: float = PATIENCE_SECONDS) -> None:
        """
        url       s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX, file:///FOLDER or /FOLDER
        patience  seconds for which a failing request is retried

        If the URL names a folder, the first put creates it. Until then the folder counts as empty.

        Raises StoreError if the package obstore is missing, or the URL is wrong.
        """
        self.url = url.rstrip("/")
        if "://" in url and "://" not in self.url:
            raise StoreError(f"{url} names no bucket or folder; allowed are s3://BUCKET/PREFIX and file:///FOLDER")
        try:
            import obstore
            from obstore.exceptions import AlreadyExistsError, BaseError
            from obstore.store import LocalStore, from_url
        except ImportError:
            raise StoreError(
                f"{self.url} needs the package obstore; pip install -e '.[store]' in the clone of recycle_pp"
            ) from None
        self._obstore: Any = obstore
        self._folder = folder_of(self.url)
        self._exists, self._errors = AlreadyExistsError, (BaseError, OSError)

        def connect() -> Any:
            if self._folder is not None:
                return LocalStore(self._folder, automatic_cleanup=True, mkdir=True)
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

        self._connect, self._connected = connect, None if self._missing() else self._call(connect)

    def get(self, path: str) -> bytes:
        return bytes(self._call(lambda: self._obstore.get(self._store, path).bytes(), path))

    def get_range(self, path: str, start: int, length: int, version: str | None = None) -> bytes:
        """`length` bytes of the object from offset `start` on, or fewer at its end. Raises StoreError if `version` is
        not None and the object now has a different version."""
        if not length:
            return b""
        options = {"range": (start, start + length)} | ({"if_match": version} if version else {})
        return bytes(self._call(lambda: self._obstore.get(self._store, path, options=options).bytes(), path))

    def get_file(self, path: str, to: Path, progress: Callable[[], None] = lambda: None) -> None:
        """Writes the object to the file `to`. Calls `progress` after each piece."""
        found = self.head(path)
        with to.open("wb") as file:
            for piece in self.ranges((path, at, min(PIECE, found.size - at)) for at in range(0, found.size, PIECE)):
                file.write(piece)
                progress()

    def ranges(self, wanted: Iterable[tuple[str, int, int] | tuple[str, int, int, str]]) -> Iterator[bytes]:
        """Yields the result of `get_range` for each tuple of arguments, in order. Sends TOGETHER requests at a time."""
        with ThreadPoolExecutor(TOGETHER) as pool:
            waiting: deque[Future[bytes]] = deque()
            try:
                for one in wanted:
                    waiting.append(pool.submit(self.get_range, *one))
                    if len(waiting) == TOGETHER:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                for future in waiting:
                    future.cancel()

    def put(self, path: str, content: bytes) -> None:
        self._put(path, content)

    def put_file(self, path: str, file: Path) -> None:
        piece = max(PIECE, -(-file.stat().st_size // MOST_PIECES))
        self._put(path, file, chunk_size=piece, max_concurrency=TOGETHER)

    def put_if_absent(self, path: str, content: bytes) -> bool:
        """Creates the object if it does not exist. Returns whether the object now has this content. False: an object
        with different content existed, and is unchanged."""
        try:
            self._put(path, content, mode="create")
        except FileExistsError:  # this call may have created it, if the answer to its first request was lost
            return self.get(path) == content
        return True

    def head(self, path: str) -> Object:
        return _object(self._call(lambda: self._obstore.head(self._store, path), path))

    def size(self, path: str) -> int:
        """The size of the object in bytes."""
        return self.head(path).size

    def list(self, folder: str = "") -> dict[str, int]:
        """Path and size in bytes of each object below `folder`. Stores may leave out objects that are seconds old."""
        return {path: found.size for path, found in self.objects(folder).items()}

    def objects(self, folder: str = "") -> dict[str, Object]:
        """Path and description of each object below `folder`. May leave out new objects, as `list` does."""
        if self._missing():
            return {}
        found = self._call(lambda: [*self._obstore.list(self._store, folder or None)])
        return {item["path"]: _object(item) for items in found for item in items}

    def folders(self, folder: str = "") -> set[str]:
        """Names of the folders in `folder`. Stores may leave out new ones, as `list` does."""
        if self._missing():
            return set()
        found = self._call(lambda: self._obstore.list_with_delimiter(self._store, folder or None))
        return {prefix.rsplit("/", 1)[-1] for prefix in found["common_prefixes"]}

    def delete(self, paths: Iterable[str]) -> None:
        """Deletes the objects. Ignores paths without an object."""
        every = list(paths)
        try:
            self._call(lambda: self._obstore.delete(self._store, every) if every else None)
        except Absent:  # if one object is missing, some stores keep the others, so delete them one at a time
            for path in every if len(every) > 1 else []:
                self.delete([path])

    def probe(self) -> None:
        """Writes, reads and deletes a small object. Raises StoreError if any of it fails, or if the store ignores the
        condition of `put_if_absent`."""
        path = f"probe-{secrets.token_hex(8)}"
        try:
            self.put_if_absent(path, b"1")
            if self.put_if_absent(path, b"2"):
                raise StoreError(f"{self.url} overwrites objects that exist: it does not support conditional puts")
            self.folders()
            self.delete([path])
        except StoreError as error:
            raise StoreError(str(error).replace(f"/{path}", "")) from None

    def _missing(self) -> bool:
        return self._folder is not None and not self._call(self._folder.exists)

    @property
    def _store(self) -> Any:
        """The store to read from. Raises FileNotFoundError if it is a folder that does not exist."""
        if self._connected is None:
            if self._missing():
                raise FileNotFoundError(self._folder)
            self._connected = self._connect()
        return self._connected

    def _put(self, path: str, content: bytes | Path, **options: Any) -> None:
        def put() -> None:
            self._connected = self._connected or self._connect()
            self._obstore.put(self._connected, path, content, **options)

        self._call(put, path)

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


def _object(found: Any) -> Object:
    return Object(int(found["size"]), found["e_tag"] or "", found["last_modified"].timestamp())


def folder_of(url: str) -> Path | None:
    """The folder that a URL names; None if it names a store of objects."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return Path(url)
    return Path(rest) if scheme == "file" else None


def in_words(error: str) -> str:
    """The reason for an error of obstore, as a part of a sentence.

    error: the text of the error, which has several lines and contains the server's answer"""
    if "PreconditionFailed" in error or "precondition failure" in error:
        return "it changed while it was read"
    code, message = (re.search(f"<{tag}>(.*?)</{tag}>", error, re.DOTALL) for tag in ("Code", "Message"))
    if code and message:
        return f"{code[1]} ({' '.join(message[1].split()).rstrip('.')})"
    if status := re.search(r"status code: (\d{3}[\w ]*)", error):
        return f"the server answered {status[1].strip()}"
    if "error sending request" in error:
        return "the server cannot be reached"
    return " ".join(error.split("\n\nDebug source")[0].split()).removeprefix("Generic ").rstrip(".")
