"""Reads Megatron-LM's indexed datasets: PREFIX.bin contains the tokens, PREFIX.idx their type and number.

    prefix = find("corpus_text_document")     # also accepts a name with .bin or .idx; None if there is no such pair
    read(prefix)

The index contains `MMIDIDX\\0\\0`, version 1, a code for the dtype, the numbers of sequences and of document
boundaries, then the lengths (int32) and byte positions (int64) of all sequences. Megatron writes sequences
consecutively, so the .bin file is one row of tokens. Documents end with an end-of-document token, if Megatron's
tokenizer wrote one. Megatron's own order of samples (three .npy files from numpy's RandomState) is not reproduced.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from .file_tokens import FileTokens
from .source import TokenSource

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype, sequences, document boundaries
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floats


def find(path: str) -> str | None:
    """The prefix of the pair of files at `path`; None if there is no such pair."""
    prefix = path.removesuffix(".idx").removesuffix(".bin")
    try:
        with open(prefix + ".idx", "rb") as file:
            # For a path to a .bin, checks the magic of the .idx, because it may be unrelated to a .bin of nanoGPT.
            named = path != prefix + ".bin"
            return prefix if named or file.read(len(MAGIC)) == MAGIC else None
    except OSError:
        return None


def read(prefix: str) -> TokenSource:
    """The tokens, read on demand.

    Raises ValueError if the pair of files is invalid; the message does not name the configuration key.
    """
    index, data = Path(prefix + ".idx"), Path(prefix + ".bin")
    if not data.is_file():
        raise ValueError(f"{index} has no {data.name} next to it")
    size = index.stat().st_size
    with index.open("rb") as file:
        head = file.read(HEADER.size)
    if len(head) < HEADER.size or not head.startswith(MAGIC):
        raise ValueError(f"{index} is not a Megatron index")
    _, version, code, sequences, boundaries = HEADER.unpack(head)
    if version != 1:
        raise ValueError(f"{index} has version {version}, but only version 1 is supported")
    if code not in DTYPES:
        raise ValueError(f"{index} specifies token type {code}, which is not an integer type")
    needed = HEADER.size + 12 * sequences + 8 * boundaries
    if size < needed:  # a larger index is valid: with multimodal data it has one more byte per sequence
        raise ValueError(f"{index} has {size} bytes; {sequences} sequences and {boundaries} boundaries need {needed}")
    tokens = _count(index, sequences, np.dtype(DTYPES[code]).itemsize)
    if tokens < 1:
        raise ValueError(f"{prefix} is empty")
    held = data.stat().st_size // np.dtype(DTYPES[code]).itemsize
    if held < tokens:
        raise ValueError(f"{data} contains {held} tokens, but {index.name} requires {tokens}")
    return TokenSource(prefix, FileTokens.open(data, np.dtype(DTYPES[code]), tokens))


def _count(index: Path, sequences: int, itemsize: int) -> int:
    """Number of tokens in all sequences. Raises ValueError if the sequences are not contiguous from byte 0 on."""
    if not sequences:
        return 0
    count, block = 0, 1 << 20
    for start in range(0, sequences, block):
        these = min(block, sequences - start)
        lengths = np.fromfile(index, "<i4", these, offset=HEADER.size + 4 * start).astype(np.int64)
        pointers = np.fromfile(index, "<i8", these, offset=HEADER.size + 4 * sequences + 8 * start)
        ends = count + np.cumsum(lengths)
        if lengths.min() < 0 or not np.array_equal(pointers, (ends - lengths) * itemsize):
            raise ValueError(f"{index}: its sequences are not contiguous, as Megatron writes them")
        count = int(ends[-1])
    return count
