"""Encodes messages as frames: a 4-byte big-endian length, then the message in MessagePack.

    sock.sendall(encode(Kill(incarnation=3)))
    frames = Frames(); frames.feed(data); body = frames.next(MAX_FRAME)     # None: incomplete

The message in a frame is at most 16 MiB long, and at most 64 KiB before authentication. The encoding is MessagePack
instead of JSON, because JSON has neither NaN (in votes on non-finite gradients) nor bytes (in plans and spans).
"""

from __future__ import annotations

import struct

import msgspec

MAX_FRAME = 16 << 20  # bytes
MAX_HANDSHAKE_FRAME = 64 << 10  # bytes, before authentication

LENGTH = struct.Struct(">I")
_encoder = msgspec.msgpack.Encoder()


class ChannelClosed(ConnectionError):
    """The connection has ended: the other end closed it, or sent an invalid message."""


class Malformed(ChannelClosed):
    """The other end has sent an invalid message, or one that it may not send. The text is one sentence with the
    reason."""


def encode(message: msgspec.Struct) -> bytes:
    """The message as one frame. Raises ValueError if the message is larger than 16 MiB."""
    body = encode_body(message)
    if len(body) > MAX_FRAME:
        raise ValueError(f"a {type(message).__name__} message has {len(body)} bytes; {MAX_FRAME} are allowed")
    return LENGTH.pack(len(body)) + body


def encode_body(message: msgspec.Struct) -> bytes:
    """The body of a frame, without its length."""
    return _encoder.encode(message)


def length_of(head: bytes | bytearray, limit: int) -> int:
    """The length of a frame's body in bytes, from the frame's first four bytes. Raises Malformed if it is above
    `limit`."""
    (length,) = LENGTH.unpack(head)
    if length > limit:
        raise Malformed(f"a frame of {length} bytes; {limit} are allowed")
    return length


class Frames:
    """Splits a byte stream into the bodies of frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next(self, limit: int) -> bytes | None:
        """The next body; None if it has not arrived completely. Raises Malformed if it is longer than `limit`
        bytes."""
        if len(self._buffer) < LENGTH.size:
            return None
        end = LENGTH.size + length_of(self._buffer[: LENGTH.size], limit)
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[LENGTH.size : end])
        del self._buffer[:end]
        return body
