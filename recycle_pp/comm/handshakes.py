"""Accepts connections on a listening socket, many in parallel, and admits those that authenticate in time.

    handshakes = Handshakes(selector, listener, greet, admitted)
    handshakes.expire(now)     # several times a second: closes connections that take too long
    handshakes.close()         # closes unauthenticated connections; the listener stays open

An unauthenticated connection is closed after `SECONDS`. If there are more than `PENDING` such connections, the oldest
one is closed. Idle connections of strangers thus use no threads and a bounded number of descriptors, and do not delay
members. All methods and callbacks run in the thread that owns the selector.
"""

from __future__ import annotations

import errno
import selectors
import socket
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from recycle_pp.wire.frames import ChannelClosed

SECONDS = 5.0  # time limit for authentication
PENDING = 128  # maximum number of unauthenticated connections
RETRY_SECONDS = 0.05  # pause after a failed accept, if no descriptor was free

Greeting = Generator[int, bytes, Any]
_NO_DESCRIPTOR = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


@dataclass
class _Pending:
    since: float  # time.monotonic()
    greeting: Greeting
    needed: int  # number of bytes that the greeting has requested
    received: bytearray = field(default_factory=bytearray)  # the requested bytes that have arrived


class Handshakes:
    def __init__(
        self,
        selector: selectors.BaseSelector,
        listener: socket.socket,
        greet: Callable[[socket.socket], Greeting],
        admitted: Callable[[socket.socket, Any], None],
    ) -> None:
        """
        listener  a non-blocking socket
        greet     returns a generator for each connection. The generator yields the number of bytes that it needs next,
                  receives these bytes, and returns the proven identity of the other end. It raises ChannelClosed to
                  reject the connection.
        admitted  called with the non-blocking socket and the generator's result; takes ownership of the socket
        """
        self._selector, self._listener, self._greet, self._admitted = selector, listener, greet, admitted
        self._pending: dict[socket.socket, _Pending] = {}  # oldest first
        selector.register(listener, selectors.EVENT_READ, self._accept)

    def expire(self, now: float) -> None:
        """Closes connections that take too long. now: time.monotonic()."""
        for sock in [sock for sock, pending in self._pending.items() if now - pending.since > SECONDS]:
            self._take(sock).close()

    def close(self) -> None:
        for sock in list(self._pending):
            self._take(sock).close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in _NO_DESCRIPTOR:
                if self._pending:
                    self._take(next(iter(self._pending))).close()
                time.sleep(RETRY_SECONDS)
            return
        if len(self._pending) == PENDING:
            self._take(next(iter(self._pending))).close()
        sock.setblocking(False)
        greeting = self._greet(sock)
        try:
            needed = next(greeting)
        except (ChannelClosed, OSError):  # the other end has already closed the connection
            sock.close()
            return
        self._pending[sock] = _Pending(time.monotonic(), greeting, needed)
        self._selector.register(sock, selectors.EVENT_READ, partial(self._receive, sock))

    def _receive(self, sock: socket.socket) -> None:
        if sock not in self._pending:  # closed by an earlier event of the same select
            return
        pending = self._pending[sock]
        try:
            part = sock.recv(pending.needed - len(pending.received))
            if not part:
                raise ChannelClosed("closed before it was authenticated")
            pending.received += part
            if len(pending.received) == pending.needed:
                data, pending.received = bytes(pending.received), bytearray()
                pending.needed = pending.greeting.send(data)
        except BlockingIOError:
            pass
        except StopIteration as done:
            self._admitted(self._take(sock), done.value)
        except (ChannelClosed, OSError):
            self._take(sock).close()

    def _take(self, sock: socket.socket) -> socket.socket:
        """Removes a connection from the pending ones and returns its socket."""
        del self._pending[sock]
        self._selector.unregister(sock)
        return sock
