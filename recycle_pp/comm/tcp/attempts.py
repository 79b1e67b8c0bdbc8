"""Repeated attempts to connect to one address, `EVERY` seconds apart, in parallel.

    attempts = Attempts(selector, ("10.0.0.2", 4711), reached)   # reached(sock): called for each connection
    attempts.update(now)     # call it often; starts the next attempt when due, ends attempts that take too long
    attempts.close()

One lost packet delays a connection by a second or more, and another attempt costs almost nothing. If all attempts fail
for several seconds, the network is cut. All methods and `reached` run in the thread that owns the selector.
"""

from __future__ import annotations

import errno
import selectors
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial

EVERY = 0.3  # seconds between two attempts
LONGEST = 3.0  # timeout of one attempt, in seconds


class Attempts:
    def __init__(
        self,
        selector: selectors.BaseSelector,
        address: tuple[str, int],
        reached: Callable[[socket.socket], None],
    ) -> None:
        """address: (numeric host, port). reached: takes ownership of a connected, non-blocking socket."""
        self._selector, self._address, self._reached = selector, address, reached
        self._begun: dict[socket.socket, float] = {}  # pending attempt -> time of its start
        self._last = float("-inf")

    def update(self, now: float) -> None:
        for sock in [sock for sock, begun in self._begun.items() if now - begun > LONGEST]:
            self._end(sock).close()
        if now - self._last >= EVERY:
            self._last = now
            with suppress(OSError):  # no free descriptor counts as a failed attempt
                self._start(now)

    def close(self) -> None:
        for sock in list(self._begun):
            self._end(sock).close()

    def _start(self, now: float) -> None:
        family = socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        if sock.connect_ex(self._address) not in (0, errno.EINPROGRESS):
            sock.close()
            return
        self._begun[sock] = now
        self._selector.register(sock, selectors.EVENT_WRITE, partial(self._finish, sock))

    def _finish(self, sock: socket.socket) -> None:
        if sock not in self._begun:  # an earlier event of the same select has ended this attempt
            return
        self._end(sock)
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            sock.close()
        else:
            self._reached(sock)

    def _end(self, sock: socket.socket) -> socket.socket:
        del self._begun[sock]
        self._selector.unregister(sock)
        return sock
