"""Reads token files, with or without a description.

    read("train.bin", dtype="auto", vocabulary=50257)
    describe("train.bin")             # the content of train.bin.json, checked against the file; None if it is missing

`train.bin` contains only little-endian uint16 or uint32 numbers, as nanoGPT writes them. `recycle_pp.tokenize` also
writes the description `train.bin.json` with dtype, count, vocabulary and checksum. Without a description the dtype is
unknown.
"""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

import numpy as np

from .file_tokens import FileTokens
from .source import Packed, TokenSource

DTYPES: dict[str, np.dtype] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
BLOCK = 1 << 20  # bytes read at once for a checksum


@dataclass(frozen=True)
class Description:
    """The description of a finished token file."""

    dtype: str  # uint16 | uint32
    tokens: int
    documents: int
    vocabulary: int  # largest token id of the tokenizer, + 1; tokens added to it later count only if they occur
    separator: int  # token after every document
    crc32: int  # CRC-32 of the file's bytes
    recipe: str  # digest of the text and the tokenizer
    packed: Packed | None = None  # for data.format=chat

    @property
    def bytes(self) -> int:
        return self.tokens * DTYPES[self.dtype].itemsize


def read(path: str, dtype: str, vocabulary: int, sequence: int | None = None) -> TokenSource:
    """The tokens of `path`, read on demand. With data.format=chat, marked tokens (`chat.packing`).

    dtype: uint16, uint32 or auto. auto means the dtype of the description, or without one uint32 if `vocabulary` is
        above 65536, else uint16.
    sequence: tokens of a sample with data.format=chat, else None

    Raises:
        ValueError: the file is empty, is not a whole number of tokens, or does not match its description; the message
            does not name the configuration key.
    """
    place = Path(path)
    description = describe(place)
    _check_format(path, None if description is None else description.packed, sequence)
    if description is not None:
        if dtype not in ("auto", description.dtype):
            raise ValueError(f"{path} contains {description.dtype} according to {sidecar(place).name}, not {dtype}")
        if description.vocabulary > vocabulary:
            raise ValueError(
                f"{path} was made by a tokenizer with {description.vocabulary} tokens; "
                f"model.vocabulary must be at least {description.vocabulary}, but it is {vocabulary}"
            )
        dtype = description.dtype
    elif dtype == "auto":
        dtype = "uint32" if vocabulary > 1 << 16 else "uint16"
    size, itemsize = place.stat().st_size, DTYPES[dtype].itemsize
    if size < itemsize:
        raise ValueError(f"{path} is empty")
    if size % itemsize:
        raise ValueError(f"{path} has {size} bytes, which is not a whole number of {dtype} tokens")
    separator, packed = (None, None) if description is None else (description.separator, description.packed)
    return TokenSource(path, FileTokens.open(place, DTYPES[dtype], size // itemsize), separator, packed)


def _check_format(path: str, packed: Packed | None, sequence: int | None) -> None:
    """Raises ValueError if the file contains conversations and data.format is not chat, or the reverse.

    Also raises ValueError if the samples do not have `sequence` tokens.
    """
    if sequence is None and packed is not None:
        raise ValueError(f"{path} contains conversations, which need data.format=chat")
    if sequence is not None and packed is None:
        raise ValueError(f"{path} has no conversations; python -m recycle_pp.tokenize --sequence=T makes such a file")
    if sequence is not None and packed is not None and packed.sequence != sequence:
        raise ValueError(
            f"{path} contains samples of {packed.sequence} tokens; model.sequence must be {packed.sequence}, "
            f"but it is {sequence}"
        )


def sidecar(path: str | Path) -> Path:
    """Path of a token file's description."""
    return Path(f"{path}.json")


def describe(path: str | Path) -> Description | None:
    """The description beside a token file; None if there is none.

    Raises ValueError if the description is invalid or does not match the file.
    """
    beside = sidecar(path)
    try:
        found = json.loads(beside.read_text())
        packed = Packed(**found.pop("packed")) if "packed" in found else None
        description = Description(**found, packed=packed)
        numbers = [getattr(description, key) for key in ("tokens", "documents", "vocabulary", "separator", "crc32")]
        numbers += astuple(packed) if packed is not None else ()
        if description.dtype not in DTYPES or not all(type(n) is int and n >= 0 for n in numbers):
            raise ValueError("a value is impossible")
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, OSError) as error:
        raise ValueError(
            f"{beside} does not describe a token file ({error}); remove it or create the file again"
        ) from None
    if (size := Path(path).stat().st_size) != description.bytes:
        raise ValueError(f"{path} has {size} bytes, but {beside.name} requires {description.bytes}")
    return description


def write_description(path: str | Path, description: Description) -> None:
    """Writes the description. Returns when it is on the disk."""
    content = asdict(description)
    if description.packed is None:
        del content["packed"]
    with sidecar(path).open("w") as file:
        file.write(json.dumps(content, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())


def checksum(path: str | Path, size: int | None = None) -> int:
    """CRC-32 of the first `size` bytes of a file (default: all)."""
    crc, left = 0, size
    with Path(path).open("rb") as file:
        while block := file.read(BLOCK if left is None else min(BLOCK, left)):
            crc, left = zlib.crc32(block, crc), None if left is None else left - len(block)
    return crc
