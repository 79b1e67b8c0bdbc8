"""Reads files of other processes, which a crash or a user may have damaged.

    read(path)                               # bytes of a regular file; never blocks on a pipe or a device
    decode(path, read(path), Summary)        # a value of a class in `records`

A missing file raises FileNotFoundError. Every other error raises `UnreadableFile`, with one sentence that names the
file and the problem.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

Record = TypeVar("Record")

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class UnreadableFile(ValueError):
    """A file cannot be read. The text is one sentence for the user that names the file and the reason."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path} cannot be read: {why}")


def open_regular(path: Path) -> BinaryIO:
    """Opens a regular file, or a link to one, for reading.

    Raises:
        FileNotFoundError: there is no such file.
        UnreadableFile: it is a folder, a pipe or a device, or permission is denied.
    """
    try:
        # Without O_NONBLOCK, opening a pipe waits for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(error.errno, error.strerror, str(path)) from None
    except (OSError, ValueError) as error:
        raise UnreadableFile(path, getattr(error, "strerror", None) or str(error)) from None
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind != stat.S_IFREG:
        os.close(descriptor)
        raise UnreadableFile(path, f"it is {_KINDS.get(kind, 'not a regular file')}")
    return os.fdopen(descriptor, "rb")


def read(path: Path) -> bytes:
    """The bytes of a regular file. Raises like `open_regular`."""
    with open_regular(path) as file:
        try:
            return file.read()
        except OSError as error:
            raise UnreadableFile(path, error.strerror or str(error)) from None


def decode(path: Path, data: bytes, of: type[Record]) -> Record:
    """The JSON in `data` as a value of type `of`. Raises UnreadableFile if `data` is not JSON or does not fit the type.

    path: the file that the error message names
    """
    try:
        return msgspec.json.decode(data, type=of)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise UnreadableFile(path, what_is_wrong(data, error)) from None


def what_is_wrong(data: bytes, error: Exception) -> str:
    """The reason why JSON could not be decoded, as the end of a sentence."""
    if not data.strip():
        return "it is empty"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, msgspec.ValidationError):
        return re.sub(r"`\$\.?", "`", _lowered(str(error))).replace(" - at", " at").replace("``", "`")
    return f"it is not JSON ({_lowered(str(error).removeprefix('JSON is malformed: '))})"


def _lowered(text: str) -> str:
    return text[:1].lower() + text[1:]
