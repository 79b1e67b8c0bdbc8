"""One TCP connection with each other worker, kept as long as both of them live.

    mesh = Mesh(rank, size, host="127.0.0.1", pool=pool)     # listens; waits for nobody
    mesh.address                                             # bytes: what the other members need
    mesh.link({2: address, 5: address})                      # starts these connections, once
    mesh.linked(2)                                           # a Job: done when that connection stands
    mesh[2].send(tensor, generation, tag)
    mesh.keep({2})                                           # member 5 is not a member any more

Of two members the one with the higher rank connects, and tries again until it succeeds. An address carries a secret of
its mesh, which a member sends first. Addresses travel over the control connections, so a stranger who finds the port
does not know it. (The data are not encrypted, nor is the secret: docs/cluster.md.)

One thread accepts, connects and authenticates (`comm/handshakes.py`). While a connection does not stand, has broken, or
the other machine leaves unanswered what was sent, both ends attempt new connections (`attempts.py`); `reachability.py`
counts for how long all of these fail.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Collection, Mapping
from functools import partial
from typing import NamedTuple

from recycle_pp.comm.handshakes import Greeting, Handshakes
from recycle_pp.comm.waiting import Job, Pool
from recycle_pp.wire.frames import ChannelClosed

from .attempts import Attempts
from .connection import Connection
from .reachability import Reachability

SECRET = 16  # bytes
HELLO = struct.Struct(f"!I{SECRET}s")  # rank, secret
CALM, BUSY = 0.3, 0.1  # seconds between two looks at the connections: if all is well, if attempts are under way
LATE = 0.5  # seconds after which the lower rank also tries whether the higher one can be reached
SURE = 0.5  # seconds of failed attempts after which all members of that machine are tried


class Address(NamedTuple):
    host: str
    port: int
    secret: str  # hexadecimal


class Mesh:
    """Up to `size` members, of whom any may be missing. Methods may be called from any thread; none blocks."""

    def __init__(
        self,
        rank: int,
        size: int,
        host: str,
        pool: Pool,
        reachability: Reachability | None = None,
        keepalive: float | None = None,
    ):
        """keepalive: seconds without an answer of the other machine after which a connection breaks; None: as long as
        the kernel tries."""
        self.rank = rank
        self._pool, self._reachability, self._keepalive = pool, reachability or Reachability(), keepalive
        self._secret = secrets.token_bytes(SECRET)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=max(128, size))
        self._listener.setblocking(False)
        self.address: bytes = json.dumps([*self._listener.getsockname()[:2], self._secret.hex()]).encode()
        self._lock = threading.Lock()
        self._others = frozenset(range(size)) - {rank}
        self._connections: dict[int, Connection] = {}
        self._awaited: dict[int, list[Job]] = {other: [] for other in self._others}
        self._addresses: Mapping[int, Address] | None = None  # of all that `link` was told
        self._members: frozenset[int] = frozenset()  # of those, without whom `keep` has dropped
        self._linked_at = 0.0
        self._closed = False
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # wakes the thread
        # The next ones are the thread's own.
        self._selector = selectors.DefaultSelector()
        self._handshakes = Handshakes(self._selector, self._listener, self._greet, self._admit)
        self._attempts: dict[int, Attempts] = {}
        self._ticked = time.monotonic()
        threading.Thread(target=self._serve, name="recycle-mesh", daemon=True).start()

    def link(self, addresses: Mapping[int, bytes]) -> None:
        """Starts the connections to the members at `addresses`, by rank; the others are missing for good. Once."""
        self._members, self._linked_at = frozenset(addresses), time.monotonic()
        self._addresses = {rank: Address(*json.loads(address)) for rank, address in addresses.items()}
        self._ring()

    @property
    def is_linked(self) -> bool:
        return self._addresses is not None

    def linked(self, rank: int) -> Job | None:
        """Done when the connection stands, or has stood; None if `link` was not told this member.

        A job of the caller's own: a generation that ends releases it, and the next one has to wait again.
        """
        if self._addresses is None or rank not in self._addresses:
            return None
        job = Job()
        with self._lock:
            if rank in self._connections:
                job.finish()
            else:
                self._awaited[rank].append(job)
        return job

    def keep(self, ranks: Collection[int]) -> None:
        """The other members have left: they are not tried any more."""
        self._members = frozenset(ranks)
        self._reachability.keep(self._members)

    def __getitem__(self, rank: int) -> Connection:
        """KeyError until it stands."""
        return self._connections[rank]

    def end(self, generation: int) -> None:
        """Lets go of the messages of this generation and of older ones."""
        with self._lock:
            connections = list(self._connections.values())
        for connection in connections:
            connection.end(generation)

    def close(self) -> None:
        """Closes the listener and every connection: what is under way fails."""
        self._ring(closes=True)
        with self._lock:
            connections = list(self._connections.values())
        for connection in connections:
            connection.close()

    def _ring(self, closes: bool = False) -> None:
        with self._lock:
            if not self._closed:
                self._closed = closes
                os.eventfd_write(self._bell, 1)

    # -- the thread ------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        self._selector.register(self._bell, selectors.EVENT_READ, partial(os.eventfd_read, self._bell))
        while not self._closed:
            for key, _ in self._selector.select(BUSY if self._attempts else CALM):
                key.data()
            if not self._closed:
                self._look(time.monotonic())
        for attempts in self._attempts.values():
            attempts.close()
        self._handshakes.close()
        self._selector.close()
        self._listener.close()
        os.close(self._bell)

    def _look(self, now: float) -> None:
        """Ends what has taken too long; tries the members whose connection is in doubt."""
        passed, self._ticked = min(now - self._ticked, 2 * CALM), now  # a longer pause was this process's own
        self._handshakes.look(now)
        addresses = self._addresses or {}
        doubtful = self._doubtful(addresses, now)
        for rank in self._attempts.keys() - doubtful:
            self._attempts.pop(rank).close()
        for rank in addresses.keys() - doubtful:
            self._reachability.reached(rank)
        for rank in doubtful:
            if rank in self._attempts:
                self._reachability.fails(rank, passed)
            else:
                at = addresses[rank]
                self._attempts[rank] = Attempts(self._selector, (at.host, at.port), partial(self._reached, rank, at))
            self._attempts[rank].look(now)
        self._reachability.look(now)

    def _doubtful(self, addresses: Mapping[int, Address], now: float) -> set[int]:
        """Members without a connection that works, and their neighbours if they cannot be reached for a while: the
        link between two machines is cut as a whole, and connections that are idle show it late."""
        members = self._members & addresses.keys()
        doubtful = {rank for rank in members if self._is_doubtful(rank, now)}
        machines = {addresses[rank].host for rank in doubtful if self._reachability.failing(rank) > SURE}
        return doubtful | {rank for rank in members if addresses[rank].host in machines}

    def _is_doubtful(self, rank: int, now: float) -> bool:
        connection = self._connections.get(rank)
        if connection is not None:
            return connection.is_over or connection.is_silent
        return rank < self.rank or now - self._linked_at > LATE

    def _reached(self, rank: int, at: Address, sock: socket.socket) -> None:
        """An attempt has succeeded: it becomes the connection, or was only to show that there can be one."""
        self._reachability.reached(rank)
        if rank > self.rank or rank in self._connections:
            sock.close()
            return
        try:
            sock.sendall(HELLO.pack(self.rank, bytes.fromhex(at.secret)))  # the buffer is empty: it does not block
        except OSError:
            sock.close()
        else:
            self._add(rank, sock)

    def _greet(self, sock: socket.socket) -> Greeting:
        """The rank of a member that connects; only members with a higher rank do."""
        rank, secret = HELLO.unpack((yield HELLO.size))
        if hmac.compare_digest(secret, self._secret) and rank in self._others and rank > self.rank:
            return rank
        raise ChannelClosed("not a member with a higher rank")

    def _admit(self, sock: socket.socket, rank: int) -> None:
        self._add(rank, sock)

    def _add(self, rank: int, sock: socket.socket) -> None:
        with self._lock:
            if self._closed or rank in self._connections:
                sock.close()
                return
            connection = self._connections[rank] = Connection(sock, self._pool)
            awaited, self._awaited[rank] = self._awaited[rank], []
        if self._keepalive is not None:
            connection.set_keepalive(self._keepalive)
        for job in awaited:
            job.finish()
