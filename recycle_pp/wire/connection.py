"""Messages between supervisors, workers and the coordinator: authenticated, length-limited JSON over TCP.

    server = await serve(handler, "127.0.0.1", 0, token)   # `await handler(peer)`, one per client
    peer = await connect(host, port, token, {"type": "hello", "role": "supervisor", "rank": 3})
    channel = Channel.connect(host, port, token, {"type": "hello", "role": "worker", "rank": 3})   # for threads

A message is a dict with a string under "type"; a frame is its JSON behind a 4-byte big-endian length, 16 MiB at most.
A connection begins with a mutual challenge: both ends prove with HMAC-SHA256 that they know the job's token, without
sending it, and the proof covers the client's hello. Whoever cannot (garbage, an oversize frame, a wrong token, silence
for `HANDSHAKE_SECONDS`) is cut off, logged once, and disturbs nobody. Nothing that arrives is unpickled or evaluated.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from .keepalive import end_after_silence

Message = dict[str, Any]

MAX_FRAME = 16 << 20  # bytes
MAX_UNSENT = 64 << 20  # bytes queued for an asyncio peer that does not read; then it is cut off
MAX_HANDSHAKE_FRAME = 64 << 10  # bytes, before the other end has proved anything
HANDSHAKE_SECONDS = 5.0

_LENGTH = struct.Struct(">I")
_log = logging.getLogger(__name__)


class ChannelClosed(ConnectionError):
    """The connection is of no more use: the other end closed it, or sent what is no message."""


class Refused(ChannelClosed):
    """The other end does not know the job's token, or did not accept ours."""


# ------------------------------------------------------------------------------------------------------ threads


class Channel:
    """A blocking connection for threads: any number of them may send, one at a time receives."""

    def __init__(self, sock: socket.socket):
        self._socket = sock
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._frames = _Frames(MAX_FRAME)

    @classmethod
    def connect(cls, host: str, port: int, token: str, hello: Message, timeout: float = 10.0) -> Channel:
        """Connects and authenticates within `timeout` seconds; OSError where that fails (Refused for a wrong token)."""
        deadline = time.monotonic() + timeout
        sock = socket.create_connection((host, port), timeout)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(timeout)
        channel = cls(sock)
        try:
            client = _Client(token, hello)
            channel.send(client.answer(channel.recv(deadline - time.monotonic())))
            client.check(channel.recv(deadline - time.monotonic()))
        except ChannelClosed as error:
            channel.close()
            raise Refused(f"no authenticated connection to {host}:{port}: {error}") from error
        except BaseException:
            channel.close()
            raise
        sock.settimeout(None)
        return channel

    def send(self, message: Message) -> None:
        """Sends one message whole; OSError once the connection is lost, ValueError above 16 MiB."""
        frame = encode(message)
        with self._sending:
            self._socket.sendall(frame)

    def recv(self, timeout: float | None = None) -> Message:
        """The next message; TimeoutError after `timeout` seconds (nothing is lost), ChannelClosed at the end."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._receiving:
            while (message := self._frames.next()) is None:
                if deadline is not None and not _readable(self._socket, deadline - time.monotonic()):
                    raise TimeoutError("no message in time")
                try:
                    data = self._socket.recv(1 << 16)
                except OSError as error:
                    raise ChannelClosed(f"the connection broke: {error}") from error
                if not data:
                    raise ChannelClosed("the connection was closed")
                self._frames.feed(data)
            return message

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def local_host(self) -> str:
        """The address of this machine that the other end sees."""
        return str(self._socket.getsockname()[0])

    def end_after_silence(self, seconds: float) -> None:
        """From now on the connection breaks when the other machine has not answered for so long, as after a cut."""
        end_after_silence(self._socket, seconds)

    def close(self) -> None:
        """From any thread; a thread that waits in `recv` gets ChannelClosed."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with self._receiving, self._sending:  # not while another thread still uses the descriptor
            self._socket.close()


# ------------------------------------------------------------------------------------------------------ asyncio


class Peer:
    """An asyncio connection: `send` never waits, `recv` does; `async for message in peer` ends with the peer."""

    hello: Message  # what an authenticated client said of itself

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self._writer = reader, writer
        name = writer.get_extra_info("peername") or ("?", 0)  # None: the other end is gone again already
        self.address: str = "{}:{}".format(*name[:2])

    @property
    def local_host(self) -> str:
        """The address of this machine that the other end sees."""
        return str(self._writer.get_extra_info("sockname")[0])

    def send(self, message: Message) -> None:
        """Queues one message. To a peer that is gone, or has left 64 MiB unread, it goes nowhere: its `recv` fails."""
        self.send_frame(encode(message))

    def send_frame(self, frame: bytes) -> None:
        """`send` of what `encode` gave."""
        if self._writer.is_closing():
            return
        self._writer.write(frame)
        if self._writer.transport.get_write_buffer_size() > MAX_UNSENT:
            self.abort()

    async def recv(self, limit: int = MAX_FRAME) -> Message:
        """The next message; ChannelClosed at the end."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            _check_length(length, limit)
            return decode(await self._reader.readexactly(length))
        except ChannelClosed:
            raise
        except (asyncio.IncompleteReadError, OSError) as error:
            raise ChannelClosed("the connection was closed") from error

    async def __aiter__(self) -> AsyncIterator[Message]:
        while True:
            try:
                message = await self.recv()
            except ChannelClosed:
                return
            yield message

    async def drain(self) -> None:
        """Waits until most of what was queued is on its way."""
        with contextlib.suppress(OSError):
            await self._writer.drain()

    def end_after_silence(self, seconds: float) -> None:
        """From now on the connection breaks when the other machine has not answered for so long, as after a cut."""
        end_after_silence(self._writer.get_extra_info("socket"), seconds)

    def close(self) -> None:
        """Closes after what is queued has been sent."""
        self._writer.close()

    def abort(self) -> None:
        """Closes at once."""
        self._writer.transport.abort()


async def connect(host: str, port: int, token: str, hello: Message, timeout: float = 10.0) -> Peer:
    """Connects and authenticates within `timeout` seconds; OSError where that fails (Refused for a wrong token)."""
    async with asyncio.timeout(timeout):
        peer = Peer(*await asyncio.open_connection(host, port))
        try:
            client = _Client(token, hello)
            peer.send(client.answer(await peer.recv(MAX_HANDSHAKE_FRAME)))
            client.check(await peer.recv(MAX_HANDSHAKE_FRAME))
        except ChannelClosed as error:
            peer.abort()
            raise Refused(f"no authenticated connection to {host}:{port}: {error}") from error
        except BaseException:
            peer.abort()
            raise
    return peer


async def serve(
    handler: Callable[[Peer], Awaitable[None]],
    host: str,
    port: int,
    token: str,
    handshake_seconds: float = HANDSHAKE_SECONDS,
) -> asyncio.Server:
    """Listens; `handler(peer)` runs for each client that proved the token, and the connection closes when it returns.

    The bound address is `server.sockets[0].getsockname()`.
    """
    refusals: set[tuple[str, str]] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(reader, writer)
        try:
            async with asyncio.timeout(handshake_seconds):
                peer.hello = await _admit(peer, token)
        except (ChannelClosed, TimeoutError) as error:
            peer.abort()
            refusal = (peer.address.rpartition(":")[0], str(error) or "no answer to the challenge in time")
            if refusal not in refusals and len(refusals) < 100:
                refusals.add(refusal)
                _log.warning("refused a connection from %s: %s (said once)", *refusal)
            return
        try:
            await handler(peer)
        except Exception:
            _log.exception("the handler of the connection from %s failed", peer.address)
        finally:
            peer.close()

    tasks: set[asyncio.Task[None]] = set()  # the loop itself keeps only weak references

    def start(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(accept(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    return await asyncio.start_server(start, host, port, backlog=1024)


# ------------------------------------------------------------------------------------------------------- frames


def encode(message: Message) -> bytes:
    """One frame; ValueError where the message is larger than 16 MiB."""
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > MAX_FRAME:
        raise ValueError(f"a message of type {message.get('type')!r} has {len(body)} bytes; {MAX_FRAME} are allowed")
    return _LENGTH.pack(len(body)) + body


def decode(body: bytes) -> Message:
    """The message in a frame's body; ChannelClosed where there is none."""
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ChannelClosed("a frame without valid JSON") from error
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise ChannelClosed('a frame without an object that has a "type"')
    return message


class _Frames:
    """Bytes in, messages out."""

    def __init__(self, limit: int):
        self._buffer, self._limit = bytearray(), limit

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next(self) -> Message | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        _check_length(length, self._limit)
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        return decode(body)


def _check_length(length: int, limit: int) -> None:
    if length > limit:
        raise ChannelClosed(f"a frame above {limit} bytes")


def _readable(sock: socket.socket, seconds: float) -> bool:
    poll = select.poll()  # unlike select() it takes any descriptor number
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(max(0.0, seconds) * 1000))


# ---------------------------------------------------------------------------------------------------- handshake
# server -> client  challenge(nonce)
# client -> server  answer(nonce', hello, HMAC(token, "client", nonce, nonce', hello))
# server -> client  accepted(HMAC(token, "server", nonce, nonce'))


class _Client:
    def __init__(self, token: str, hello: Message):
        self._token, self._hello, self._nonce = token, json.dumps(hello), secrets.token_hex(32)

    def answer(self, challenge: Message) -> Message:
        self._challenge = str(challenge.get("nonce"))
        proof = _proof(self._token, "client", self._challenge, self._nonce, self._hello)
        return {"type": "answer", "nonce": self._nonce, "hello": self._hello, "proof": proof}

    def check(self, accepted: Message) -> None:
        if not _same(accepted.get("proof"), _proof(self._token, "server", self._challenge, self._nonce)):
            raise Refused("the other end does not know the job's token")


async def _admit(peer: Peer, token: str) -> Message:
    challenge = secrets.token_hex(32)
    peer.send({"type": "challenge", "nonce": challenge})
    answer = await peer.recv(MAX_HANDSHAKE_FRAME)
    nonce, hello = str(answer.get("nonce")), str(answer.get("hello"))
    if not _same(answer.get("proof"), _proof(token, "client", challenge, nonce, hello)):
        raise Refused("a wrong job token")
    message = decode(hello.encode("utf-8", "replace"))
    peer.send({"type": "accepted", "proof": _proof(token, "server", challenge, nonce)})
    return message


def _proof(token: str, *parts: str) -> str:
    # Lengths keep ("ab", "c") and ("a", "bc") apart.
    text = "".join(f"{len(part)}:{part}" for part in parts)
    return hmac.new(token.encode(), text.encode("utf-8", "surrogatepass"), "sha256").hexdigest()


def _same(proof: object, expected: str) -> bool:
    return isinstance(proof, str) and hmac.compare_digest(proof.encode("utf-8", "replace"), expected.encode())
