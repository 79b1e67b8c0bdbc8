"""A network between the processes of a `VirtualLoop`: connections as `wire.connection` makes them, without sockets.

    net = Network(loop, random.Random(7), delay=lambda: 0.01)
    server = await net.serve(handler, "10.0.0.1", 0, token)      # in a process
    peer = await net.connect(*server.sockets[0].getsockname(), token, hello)
    net.cut(("a", "b"), ("b", "a"))       # delays messages from a to b and from b to a; one pair cuts one direction
    net.heal()                            # delivers delayed messages, unless a connection has timed out
    net.reset()                           # breaks one connection and drops its messages in flight
    net.lost("a")                         # after the death of a process: breaks its connections, closes its port

Messages of one connection arrive in order, delayed by `delay`. As with TCP, a connection needs both directions to be
established. If either direction is cut, it breaks after its keepalive; until then the other direction still delivers.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextvars import Context, copy_context
from types import SimpleNamespace
from typing import Any

from recycle_pp.wire.frames import ChannelClosed, encode, encode_body
from recycle_pp.wire.messages.handshake import HELLOS
from recycle_pp.wire.messages.table import Message, Vocabulary

from .clock import PROCESS, VirtualLoop


class Network:
    def __init__(self, loop: VirtualLoop, chance: random.Random, delay: Callable[[], float]) -> None:
        self.loop, self.delay = loop, delay
        self._chance = chance
        self._servers: dict[int, tuple[str, Context, Callable[[Peer], Any]]] = {}
        self._ends: list[Peer] = []  # ends of open connections
        self._cut: set[tuple[str, str]] = set()  # (from, to)

    async def serve(self, handler: Any, host: str, port: int, token: str, clients: int = 0) -> Any:
        process = PROCESS.get()
        assert process is not None
        port = port or 1000 + len(self._servers)
        self._servers[port] = (process, copy_context(), handler)
        socket = SimpleNamespace(getsockname=lambda: (host, port))
        return SimpleNamespace(sockets=[socket], close=lambda: self._servers.pop(port, None))

    async def connect(self, host: str, port: int, token: str, hello: Message, timeout: float = 10.0) -> Peer:
        here = PROCESS.get()
        assert here is not None
        async with asyncio.timeout(timeout):
            await asyncio.sleep(self.delay())
            if port not in self._servers:
                raise ConnectionRefusedError
            there, context, handler = self._servers[port]
            while self.is_broken(here, there):
                await asyncio.sleep(1.0)
            accepted = self.loop.create_future()
            self.loop.call_soon(self._accept, accepted, handler, here, there, hello, context=context)
            mine = await accepted
            try:
                await asyncio.sleep(self.delay())
            except BaseException:
                mine.abort()
                raise
            return mine

    def _accept(self, accepted: Any, handler: Any, here: str, there: str, hello: Message) -> None:
        """Accepts the connection. Runs in the listening process."""
        if accepted.done():  # the connecting side has given up
            return
        mine, theirs = Peer(self, here), Peer(self, there)
        mine.other, theirs.other, theirs.hello = theirs, mine, HELLOS.decode(encode_body(hello))
        self._ends += [mine, theirs]

        async def handle() -> None:
            try:
                await handler(theirs)
            finally:
                theirs.close()

        self.loop.create_task(handle())
        accepted.set_result(mine)

    def is_cut(self, sender: str, receiver: str) -> bool:
        return (sender, receiver) in self._cut

    def is_broken(self, a: str, b: str) -> bool:
        """Whether either direction is cut."""
        return self.is_cut(a, b) or self.is_cut(b, a)

    def cut(self, *links: tuple[str, str]) -> None:
        """Cuts directed links, pairs of names (from, to). Messages wait until the link heals."""
        self._cut |= set(links)
        for end in self._ends:
            if self.is_broken(end.process, end.other.process) and end.keepalive is not None:
                self.loop.call_later(end.keepalive, end.time_out)

    def heal(self) -> None:
        self._cut.clear()
        for end in self._ends:
            end.flush()

    def reset(self) -> None:
        if self._ends:
            end = self._chance.choice(self._ends)
            end.breaks()
            end.other.breaks()

    def lost(self, process: str) -> None:
        self._servers = {port: server for port, server in self._servers.items() if server[0] != process}
        for end in [end for end in self._ends if end.process == process]:
            self.forget(end)
            self.loop.call_later(self.delay(), end.other.breaks)

    def forget(self, end: Peer) -> None:
        if end in self._ends:
            self._ends.remove(end)


class Peer:
    """One end of a connection, with the interface of `wire.connection.Peer`."""

    other: Peer
    hello: Message

    def __init__(self, network: Network, process: str) -> None:
        self.process, self.address, self.local_host = process, process, process
        self.keepalive: float | None = None
        self._network, self._context = network, copy_context()
        self._context.run(PROCESS.set, process)
        self._came: deque[Any] = deque()  # None: the end
        self._waiting: asyncio.Future[None] | None = None
        self._held: list[Any] = []  # messages delayed by a cut
        self._closed = False
        self._last = 0.0  # arrival time of the last message

    def send(self, message: Any) -> None:
        """Sends a message. An object that is not a `Message` is delivered as it is."""
        self.send_frame(encode(message) if isinstance(message, Message) else message)

    def send_frame(self, frame: Any) -> None:
        if not self._closed:
            self._held.append(frame)
            self.flush()

    def flush(self) -> None:
        if self._network.is_cut(self.process, self.other.process):
            return
        loop = self._network.loop
        for frame in self._held:
            self._last = max(self._last, loop.time() + self._network.delay())
            loop.call_at(self._last, self.other._arrives, frame, context=self.other._context)
        self._held.clear()

    def _arrives(self, frame: Any) -> None:
        self._came.append(frame)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def recv(self, vocabulary: Vocabulary) -> Any:
        while not self._came:
            self._waiting = self._network.loop.create_future()
            await self._waiting
        if self._came[0] is None:
            raise ChannelClosed("the connection was closed")
        frame = self._came.popleft()
        return vocabulary.decode(frame[4:]) if isinstance(frame, bytes) else frame

    async def listen(self, vocabulary: Vocabulary) -> AsyncIterator[Any]:
        while True:
            try:
                message = await self.recv(vocabulary)
            except ChannelClosed:
                return
            yield message

    def set_keepalive(self, seconds: float) -> None:
        self.keepalive = seconds
        if self._network.is_broken(self.process, self.other.process):
            self._network.loop.call_later(seconds, self.time_out)

    def time_out(self) -> None:
        if self._network.is_broken(self.process, self.other.process):
            self.breaks()

    def close(self) -> None:
        """Closes the connection after all sent messages. The other end then sees it closed."""
        if not self._closed:
            self._held.append(None)
            self.flush()
            self.breaks()

    abort = close

    def breaks(self) -> None:
        """Breaks this end of the connection and drops unread messages."""
        self._closed = True
        self._network.forget(self)
        self._came.clear()
        self._arrives(None)
