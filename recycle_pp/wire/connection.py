"""Authenticated connections between supervisors, workers and the coordinator, over TCP.

    server = await serve(handler, "127.0.0.1", 0, token)   # calls `await handler(peer)` for each client; peer.hello
    peer = await connect(host, port, token, SupervisorHello(rank=3, ...))
    async for message in peer.listen(TO_SUPERVISOR): ...
    channel = Channel.connect(host, port, token, WorkerHello(rank=3, ...))   # for threads
    channel, hello = Channel.accept(sock, token)                             # the other end, for threads
    channel.send(message); message = channel.recv(TO_WORKER)

The receiver chooses which messages it accepts: a `Vocabulary` of `wire.messages`. A connection starts with the mutual
authentication of `authentication.py`. A connection is closed and logged if the authentication fails or takes longer
than `HANDSHAKE_SECONDS`, or if the other end sends anything except accepted messages (garbage, an oversized frame, an
unknown kind, a wrong type). Other connections are not affected. Received data is never unpickled or evaluated.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from recycle_pp.linux.descriptors import readable

from .authentication import Prover, Refused, Verifier, prove
from .frames import LENGTH, MAX_FRAME, MAX_HANDSHAKE_FRAME, ChannelClosed, Frames, Malformed, encode, length_of
from .keepalive import set_keepalive
from .launch import joined
from .messages.handshake import HELLOS, TO_CLIENT, TO_SERVER, OtherToken
from .messages.table import Message, Vocabulary

MAX_UNSENT = 64 << 20  # bytes of queued data above which an asyncio peer is disconnected, because it seems not to read
HANDSHAKE_SECONDS = 5.0
SILENT_SECONDS = 30.0  # seconds without an answer from the other machine after which a connection breaks, by default
UNPROVEN = 400  # connections that may wait for authentication, in addition to those of expected clients
REPEAT_SECONDS = 10.0  # seconds between log lines about the same refusal; a node that retries must not flood the log

NO_JOB = "the process that listens there is not a recycle_pp job"

_log = logging.getLogger(__name__)


# ------------------------------------------------------------------------------------------------------ threads


class Channel:
    """A blocking connection for threads. Several threads may send at once; only one thread at a time can receive."""

    def __init__(self, sock: socket.socket):
        self._socket = sock
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._frames = Frames()

    @classmethod
    def connect(cls, host: str, port: int, token: str, hello: Message, timeout: float = 10.0) -> Channel:
        """Connects and authenticates within `timeout` seconds. Raises OSError on failure (Refused for a wrong
        token)."""
        deadline = time.monotonic() + timeout
        sock = socket.create_connection((host, port), timeout)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(timeout)
        channel = cls(sock)

        def receive(vocabulary: Vocabulary) -> Message:
            return channel.recv(vocabulary, deadline - time.monotonic(), MAX_HANDSHAKE_FRAME)

        try:
            prove(token, hello, channel.send, receive)
        except ChannelClosed as error:
            channel.close()
            closed = Refused if isinstance(error, Refused) else ChannelClosed
            raise closed(f"no authenticated connection to {joined(host, port)}: {error}") from error
        except BaseException:
            channel.close()
            raise
        sock.settimeout(None)
        return channel

    @classmethod
    def accept(cls, sock: socket.socket, token: str) -> tuple[Channel, Message]:
        """Authenticates a client that has connected, within HANDSHAKE_SECONDS. Returns the channel and the client's
        hello. On failure, closes the connection and raises OSError."""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(HANDSHAKE_SECONDS)
        channel, verifier = cls(sock), Verifier(token, HELLOS)
        try:
            channel.send(verifier.challenge)
            channel.send(verifier.judge(channel.recv(TO_SERVER, HANDSHAKE_SECONDS, MAX_HANDSHAKE_FRAME)))
        except Refused:
            with contextlib.suppress(OSError):
                channel.send(OtherToken())
            channel.close()
            raise
        except BaseException:
            channel.close()
            raise
        sock.settimeout(None)
        return channel, verifier.hello

    def detach(self) -> socket.socket:
        """Returns the socket, for data without frames. Call this only while no message is in transit, and do not use
        the channel afterwards."""
        return self._socket

    def send(self, message: Message) -> None:
        """Sends one whole message. Raises OSError if the connection is lost, ValueError if the message is larger than
        16 MiB."""
        frame = encode(message)
        with self._sending:
            self._socket.sendall(frame)

    def recv(self, vocabulary: Vocabulary, timeout: float | None = None, limit: int = MAX_FRAME) -> Message:
        """The next message.

        Raises:
            TimeoutError: no message within `timeout` seconds; no data is lost.
            ChannelClosed: the connection ended.
            Malformed: the message is not in the vocabulary.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._receiving:
            while (body := self._frames.next(limit)) is None:
                if deadline is not None and not readable(self._socket.fileno(), deadline - time.monotonic()):
                    raise TimeoutError("no message in time")
                try:
                    data = self._socket.recv(1 << 16)
                except OSError as error:
                    raise ChannelClosed(f"the connection broke: {error}") from error
                if not data:
                    raise ChannelClosed("the connection was closed")
                self._frames.feed(data)
        return vocabulary.decode(body)

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def local_host(self) -> str:
        """The address of this machine that the connection uses."""
        return str(self._socket.getsockname()[0])

    def set_keepalive(self, seconds: float) -> None:
        """Makes the connection break after `seconds` without an answer from the other machine, because the machine is
        dead or the network is cut."""
        set_keepalive(self._socket, seconds)

    def close(self) -> None:
        """Closes the connection, from any thread. A pending `recv` raises ChannelClosed."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with self._receiving, self._sending:  # waits until no other thread uses the descriptor
            self._socket.close()


# ------------------------------------------------------------------------------------------------------ asyncio


class Peer:
    """An asyncio connection. `send` never waits; `recv` waits for a message.

    `async for message in peer.listen(...)` ends when the connection ends."""

    hello: Message  # on a server: the hello of the authenticated client

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, refusals: Refusals | None = None
    ) -> None:
        self._reader, self._writer = reader, writer
        self._refusals = refusals or Refusals()
        self.was_reset = False  # whether a reset ended the connection; if so, the other end may be alive and reconnect
        name = writer.get_extra_info("peername") or ("?", 0)  # None: the other end has already disconnected
        self.address: str = "{}:{}".format(*name[:2])

    @property
    def local_host(self) -> str:
        """The address of this machine that the connection uses."""
        return str(self._writer.get_extra_info("sockname")[0])

    def send(self, message: Message) -> None:
        """Queues one message. Drops the message if the connection has ended.

        Ends the connection if more than 64 MiB are then queued; later calls of `recv` raise ChannelClosed."""
        self.send_frame(encode(message))

    def send_frame(self, frame: bytes) -> None:
        """Like `send`, but the message is already encoded."""
        if self._writer.is_closing():
            return
        self._writer.write(frame)
        if self._writer.transport.get_write_buffer_size() > MAX_UNSENT:
            self.abort()

    async def recv(self, vocabulary: Vocabulary, limit: int = MAX_FRAME) -> Message:
        """The next message. Raises ChannelClosed if the connection has ended, Malformed if the message is invalid."""
        try:
            length = length_of(await self._reader.readexactly(LENGTH.size), limit)
            body = await self._reader.readexactly(length)
        except ChannelClosed:
            raise
        except (asyncio.IncompleteReadError, OSError) as error:
            self.was_reset = isinstance(error, ConnectionError)
            raise ChannelClosed("the connection was closed") from error
        return vocabulary.decode(body)

    async def listen(self, vocabulary: Vocabulary) -> AsyncIterator[Message]:
        """Yields all messages until the connection ends. A malformed message ends the connection."""
        while True:
            try:
                message = await self.recv(vocabulary)
            except Malformed as error:
                self._refusals.log(self.address, error)
                self.abort()
                return
            except ChannelClosed:
                return
            yield message

    async def drain(self) -> None:
        """Waits until most of the queued data has been sent."""
        with contextlib.suppress(OSError):
            await self._writer.drain()

    def set_keepalive(self, seconds: float) -> None:
        """Makes the connection break after `seconds` without an answer from the other machine, because the machine is
        dead or the network is cut."""
        with contextlib.suppress(OSError):  # the connection has just ended
            set_keepalive(self._writer.get_extra_info("socket"), seconds)

    def close(self) -> None:
        """Closes the connection after sending the queued messages."""
        self._writer.close()

    def abort(self) -> None:
        """Closes the connection at once and drops the queued messages."""
        self._writer.transport.abort()


async def connect(host: str, port: int, token: str, hello: Message, timeout: float = 10.0) -> Peer:
    """Connects and authenticates within `timeout` seconds. Raises OSError on failure (Refused for a wrong token)."""
    async with asyncio.timeout(timeout):
        peer, prover = Peer(*await asyncio.open_connection(host, port)), Prover(token, hello)
        try:
            try:
                response = prover.respond(await peer.recv(TO_CLIENT, MAX_HANDSHAKE_FRAME))
            except ChannelClosed as error:
                raise ChannelClosed(NO_JOB) from error
            peer.send(response)
            prover.check(await peer.recv(TO_CLIENT, MAX_HANDSHAKE_FRAME))
            peer.set_keepalive(SILENT_SECONDS)
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
    clients: int = 0,
) -> asyncio.Server:
    """Listens at `host` and `port`. Runs `handler(peer)` for each authenticated client, and closes the connection when
    the handler returns.

    clients: number of clients that may connect at the same moment, for instance after a takeover. If more than
        `clients` + UNPROVEN connections wait for authentication, the oldest one is closed.

    The bound address is `server.sockets[0].getsockname()`.
    """
    refusals, unproven = Refusals(), dict[Peer, None]()  # unproven: not authenticated yet, oldest first

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(reader, writer, refusals)
        if len(unproven) == UNPROVEN + clients:
            (oldest := next(iter(unproven))).abort()
            del unproven[oldest]
        unproven[peer] = None
        try:
            async with asyncio.timeout(handshake_seconds):
                peer.hello = await _admit(peer, token)
            peer.set_keepalive(SILENT_SECONDS)
        except (ChannelClosed, TimeoutError) as error:
            peer.abort()
            refusals.log(peer.address, error)
            return
        finally:
            unproven.pop(peer, None)
        try:
            await handler(peer)
        except Exception:
            _log.exception("the handler of the connection from %s failed", peer.address)
        finally:
            peer.close()

    tasks: set[asyncio.Task[None]] = set()  # keeps the tasks alive: the event loop has only weak references to them

    def start(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(accept(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    return await asyncio.start_server(start, host, port, backlog=1024)


async def _admit(peer: Peer, token: str) -> Message:
    verifier = Verifier(token, HELLOS)
    peer.send(verifier.challenge)
    response = await peer.recv(TO_SERVER, MAX_HANDSHAKE_FRAME)
    try:
        peer.send(verifier.judge(response))
    except Refused:
        peer.send(OtherToken())
        raise
    return verifier.hello


class Refusals:
    """Logs why connections from an address are rejected: the same reason at most every `REPEAT_SECONDS`, and a limited
    number of lines in total."""

    def __init__(self) -> None:
        self._logged: dict[tuple[str, str], float] = {}
        self._left = 1000  # number of lines that may still be logged

    def log(self, address: str, error: Exception) -> None:
        refusal = (address.rpartition(":")[0], str(error) or "no answer to the challenge in time")
        now = time.monotonic()
        if now - self._logged.get(refusal, -math.inf) >= REPEAT_SECONDS and self._left and len(self._logged) < 100:
            self._logged[refusal] = now
            self._left -= 1
            _log.warning("refused a connection from %s: %s", *refusal)
