"""Reads tokens from a file on demand, and measures the response time of its disk.

    tokens = FileTokens.open("train.bin", np.dtype("<u2"), count=4000)
    tokens[0:1025]                # (1025,) tokens
    tokens.part(0, 2000)          # the first 2000 tokens, as a FileTokens of the same open file
    slowest_read()                # Read(path, seconds); None if no file is open
    probe_disks(seconds)          # once per process: calls `probe` in a thread that never ends
    probe()                       # reads a byte of every open file from its disk; blocks until the disk responds

A read is a system call (pread), not a page fault, so the other threads of the process run while it waits. Each read
checks that the opened file is unchanged, and raises UserMistake if it was truncated or overwritten. If a different file
is moved to the same path, there is no error, because the old file stays open.
"""

from __future__ import annotations

import errno
import hashlib
import os
import random
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from recycle_pp.config.mistakes import UserMistake

PAGE = 4096
_PIECES, _PIECE_TOKENS = 256, 1 << 16  # pieces that determine a large file's fingerprint, and tokens of each
_files: weakref.WeakSet[_File] = weakref.WeakSet()
_lock = threading.Lock()  # guards _files
_random = random.Random()  # not the module's own generator, which a user's model may have seeded


class Read(NamedTuple):
    """The longest pending read.

    path     path of the file
    seconds  time since the read began; 0 if no read is pending
    """

    path: str
    seconds: float


def slowest_read() -> Read | None:
    """The longest pending read of this process; None if no token file is open. May be called from any thread."""
    now = time.monotonic()
    reads = [Read(file.path, max(0.0, now - file.waits_since(now))) for file in _open_files()]
    return max(reads, key=lambda read: read.seconds, default=None)


def probe_disks(seconds: float) -> None:
    """Starts a thread that probes the disks every `seconds`. `slowest_read` reports a probe that is blocked.

    A worker that waits for a peer does not read, so without probes the state of its disk would be unknown, and the
    coordinator could not distinguish the failure of one disk from a failure of all disks.
    """

    def repeat() -> None:
        while True:
            probe()
            time.sleep(seconds)

    threading.Thread(target=repeat, name="disk probe", daemon=True).start()


def probe() -> None:
    """Reads one byte of each open file, at a random place, from the disk and not from the kernel's cache.

    Ignores errors, because the next read will raise them.
    """
    for file in _open_files():
        with suppress(OSError, UserMistake):
            file.probe()


def _open_files() -> list[_File]:
    with _lock:
        return list(_files)


class FileTokens:
    """Tokens `start` to `stop` of an open file: a (stop - start,) array that is read when it is sliced."""

    def __init__(self, file: _File, start: int, stop: int) -> None:
        self._file, self._start, self._stop = file, start, stop

    @classmethod
    def open(cls, path: str | Path, dtype: np.dtype, count: int) -> FileTokens:
        """The first `count` tokens of the file."""
        return cls(_File(str(path), dtype, count), 0, count)

    @property
    def dtype(self) -> np.dtype:
        return self._file.dtype

    @property
    def fingerprint(self) -> str:
        """`fingerprint` of all tokens of the file when it was opened."""
        return self._file.fingerprint

    def __len__(self) -> int:
        return self._stop - self._start

    def __getitem__(self, place: slice) -> np.ndarray:
        """Raises UserMistake if the file has changed since it was opened, OSError if it cannot be read."""
        start, stop, _ = place.indices(len(self))
        size = self.dtype.itemsize
        data = self._file.read((self._start + start) * size, max(0, stop - start) * size)
        return np.frombuffer(data, self.dtype)

    def part(self, start: int, stop: int) -> FileTokens:
        return FileTokens(self._file, self._start + start, self._start + stop)


def fingerprint(tokens: np.ndarray | FileTokens) -> str:
    """Digest of the number of tokens and their bytes. Of a large file, reads only 256 pieces."""
    digest = hashlib.sha256(str((len(tokens), tokens.dtype)).encode())
    if len(tokens) <= _PIECE_TOKENS * _PIECES:
        digest.update(tokens[:].tobytes())
    else:
        for start in np.linspace(0, len(tokens) - _PIECE_TOKENS, _PIECES).astype(np.int64):
            digest.update(tokens[start : start + _PIECE_TOKENS].tobytes())
    return digest.hexdigest()[:16]


class _File:
    def __init__(self, path: str, dtype: np.dtype, count: int) -> None:
        self.path, self.dtype, self._count = path, dtype, count
        self._descriptor = os.open(path, os.O_RDONLY)
        about = os.fstat(self._descriptor)
        self._size, self._modified = about.st_size, about.st_mtime_ns
        self._compares = False
        self._reads: set[float] = set()  # start times of pending reads
        with _lock:
            _files.add(self)
        self.fingerprint = fingerprint(FileTokens(self, 0, count))

    def __del__(self) -> None:
        with suppress(AttributeError, OSError):  # in case the file could not be opened
            os.close(self._descriptor)

    def waits_since(self, now: float) -> float:
        """Start time of the oldest pending read; `now` if none is pending."""
        return min(tuple(self._reads), default=now)

    def read(self, offset: int, size: int) -> bytes:
        data, about = self._read(offset, size)
        if about.st_size != self._size:
            happened = "was truncated" if about.st_size < self._size else "has grown"
            raise self._mistake(f"{happened} from {self._size} to {about.st_size} bytes")
        if about.st_mtime_ns != self._modified and not self._compares:
            self._compare(about.st_mtime_ns)
        return data

    def _compare(self, modified: int) -> None:
        """Raises UserMistake if the fingerprint of the tokens has changed. A new modification time alone does not
        matter.

        modified: the new modification time of the file, in nanoseconds
        """
        self._compares = True
        try:
            same = fingerprint(FileTokens(self, 0, self._count)) == self.fingerprint
        finally:
            self._compares = False
        if not same:
            raise self._mistake("was overwritten")
        self._modified = modified

    def probe(self) -> None:
        offset = _random.randrange(0, self._size, PAGE)
        os.posix_fadvise(self._descriptor, offset, PAGE, os.POSIX_FADV_DONTNEED)
        self._read(offset, 1)

    def _read(self, offset: int, size: int) -> tuple[bytes, os.stat_result]:
        """(`size` bytes, or fewer at the end of the file; the file's status after the read)."""
        began = time.monotonic()
        self._reads.add(began)
        try:
            data = os.pread(self._descriptor, size, offset)
            while len(data) < size and (more := os.pread(self._descriptor, size - len(data), offset + len(data))):
                data += more
            return data, os.fstat(self._descriptor)
        except OSError as error:
            if error.errno == errno.ESTALE:  # NFS: the server no longer has the file
                raise self._mistake("was replaced or removed") from None
            raise OSError(error.errno, error.strerror, self.path) from None
        finally:
            self._reads.discard(began)

    def _mistake(self, happened: str) -> UserMistake:
        return UserMistake(
            f"{self.path} {happened} while the job read it, so the job can no longer read its samples; restore the "
            "file, then run.resume=true continues from the newest checkpoint"
        )
