"""Messages as frames: a 4-byte big-endian length, then the message in MessagePack.

    sock.sendall(encode(Kill(incarnation=3)))
    frames = Frames(); frames.feed(data); body = frames.next(MAX_FRAME)     # None: not whole yet

A frame has 16 MiB at most, and 64 KiB as long as the other end has proved nothing. MessagePack, not JSON: a vote on a
gradient that is not finite carries NaN, and plans and spans are bytes.
"""

from __future__ import annotations

import struct

import msgspec

MAX_FRAME = 16 << 20  # bytes
MAX_HANDSHAKE_FRAME = 64 << 10  # bytes, before the other end has proved anything

LENGTH = struct.Struct(">I")
_encoder = msgspec.msgpack.Encoder()


class ChannelClosed(ConnectionError):
    """The connection has ended: the other end closed it, or sent something that is no message."""


class Malformed(ChannelClosed):
    """The bytes are no message that the other end may send; the text says why in one sentence."""


def encode(message: msgspec.Struct) -> bytes:
    """One frame; ValueError where the message is larger than 16 MiB."""
    body = encode_body(message)
    if len(body) > MAX_FRAME:
        raise ValueError(f"a {type(message).__name__} message has {len(body)} bytes; {MAX_FRAME} are allowed")
    return LENGTH.pack(len(body)) + body


def encode_body(message: msgspec.Struct) -> bytes:
    """A frame without its length."""
    return _encoder.encode(message)


def length_of(head: bytes | bytearray, limit: int) -> int:
    """Bytes of the body behind these first four; Malformed above `limit`."""
    (length,) = LENGTH.unpack(head)
    if length > limit:
        raise Malformed(f"a frame of {length} bytes; {limit} are allowed")
    return length


class Frames:
    """Cuts a stream of bytes into the bodies of frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next(self, limit: int) -> bytes | None:
        """The next body; None while it is not whole. Malformed above `limit` bytes."""
        if len(self._buffer) < LENGTH.size:
            return None
        end = LENGTH.size + length_of(self._buffer[: LENGTH.size], limit)
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[LENGTH.size : end])
        del self._buffer[:end]
        return body
