"""Encodes one island's delta of some units as the content of an object, and decodes it.

    codes, sent = encode(values, bits=8)            # codes: bytes; sent: the values that a receiver will decode
    residual = values - sent                        # error feedback: add it to the values of the next round
    content = seal(codes, digest, values.size, bits=8)
    values = opened(content, digest, size)          # raises Damaged, with the reason

bits=8: each row of 256 values has a float16 scale and 256 int8 codes. bits=32: the values themselves, float32.

Every island decodes the same objects, and all islands must compute the same bits. So everything runs in numpy, on the
host, one operation at a time. An operation of numpy on float32 is correctly rounded, so its result does not depend on
the processor.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

ROW = 256  # values that share a scale
LARGEST = 127  # largest code
# A scale is multiplied by this factor before it is stored. Deltas are small, and float16 has few bits below 6e-5. With
# the factor, scales from 4e-9 to 4 keep 11 bits, which is enough for deltas from 5e-7 to 500.
FACTOR = np.float32(2.0**14)
LARGEST_SCALE = np.float32(65504.0)  # largest float16
_MAGIC = b"recycle1"
_HEADER = struct.Struct("<8sB16sQI")  # magic, bits, digest of the layout, number of values, CRC-32 of the codes


class Damaged(ValueError):
    """The content is not a delta of these units. The message is the reason, without the name of the object."""


def encode(values: Floats, bits: int) -> tuple[bytes, Floats]:
    """Returns (codes, the values that `decode` returns for them).

    values  float32 (n,), finite
    bits    8 or 32
    """
    if bits == 32:
        return values.astype("<f4").tobytes(), values.copy()
    rows = _rows(values)
    largest = np.abs(rows).max(axis=1)
    scaled = largest / np.float32(LARGEST)
    scaled = scaled * FACTOR
    scales = np.minimum(scaled, LARGEST_SCALE).astype("<f2")
    steps = _steps(scales)
    divisors = np.where(steps > 0, steps, np.float32(1))  # 1 for rows of zeros, or of values too small for a scale
    quotients = rows / divisors[:, None]
    codes = np.clip(np.rint(quotients), -LARGEST, LARGEST).astype(np.int8)
    codes[steps == 0] = 0
    return scales.tobytes() + codes.tobytes(), _values(codes, steps, values.size)


def decode(codes: bytes, size: int, bits: int) -> Floats:
    """The values, float32 (size,). codes: as `encode` returned them, `encoded_bytes(size, bits)` long"""
    if bits == 32:
        return np.frombuffer(codes, "<f4").astype(np.float32)
    rows = _number_of_rows(size)
    scales = np.frombuffer(codes, "<f2", rows)
    return _values(np.frombuffer(codes, np.int8, rows * ROW, offset=2 * rows).reshape(rows, ROW), _steps(scales), size)


def encoded_bytes(size: int, bits: int) -> int:
    """Number of bytes of the codes of `size` values."""
    return 4 * size if bits == 32 else (2 + ROW) * _number_of_rows(size)


def content_bytes(size: int, bits: int) -> int:
    """Number of bytes of an object with `size` values."""
    return _HEADER.size + encoded_bytes(size, bits)


def seal(codes: bytes, digest: bytes, size: int, bits: int) -> bytes:
    """The content of an object.

    codes   from `encode`
    digest  16 bytes that identify the layout of the units (`layout.digest`)
    size    number of values
    """
    return _HEADER.pack(_MAGIC, bits, digest, size, zlib.crc32(codes)) + codes


def opened(content: bytes, digest: bytes, size: int) -> Floats:
    """The values in an object, float32 (size,). Raises Damaged if the object has a different format, layout or size, or
    if its checksum is wrong."""
    if len(content) < _HEADER.size:
        raise Damaged(f"it has {len(content)} bytes, fewer than its header")
    magic, bits, of, count, checksum = _HEADER.unpack_from(content)
    codes = content[_HEADER.size :]
    if magic != _MAGIC or bits not in (8, 32):
        raise Damaged("it is not a delta of this version of recycle_pp")
    if of != digest:
        raise Damaged("its units have a different layout from those of this island")
    if count != size or len(codes) != encoded_bytes(size, bits):
        raise Damaged(
            f"it has {len(content)} bytes for {count} values, expected {content_bytes(size, bits)} for {size}"
        )
    if zlib.crc32(codes) != checksum:
        raise Damaged("its checksum is wrong")
    return decode(codes, size, bits)


def _number_of_rows(size: int) -> int:
    return -(-size // ROW)


def _rows(values: Floats) -> Floats:
    """The values as rows of ROW, filled up with zeros."""
    rows = np.zeros((_number_of_rows(values.size), ROW), np.float32)
    rows.reshape(-1)[: values.size] = values
    return rows


def _steps(scales: NDArray[np.float16]) -> Floats:
    """The difference between the values of two neighbouring codes, for each row. Exact."""
    return scales.astype(np.float32) / FACTOR


def _values(codes: NDArray[np.int8], steps: Floats, size: int) -> Floats:
    return (codes.astype(np.float32) * steps[:, None]).reshape(-1)[:size].copy()
