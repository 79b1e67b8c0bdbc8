"""One TCP connection to each of the other workers, kept while both ends live.

    mesh = Mesh(rank, size, host="127.0.0.1", pool=pool)     # listens; does not wait
    mesh.address                                             # bytes: the address for other members
    mesh.link({2: address, 5: address})                      # starts these connections; call it only once
    mesh.linked(2)                                           # a Job: done when that connection is established
    mesh[2].send(tensor, generation, tag)
    mesh.keep({2})                                           # rank 5 is no longer a member

In each pair the member with the higher rank connects, and retries until it succeeds. The address of a mesh contains a
secret, which a connecting member must send first. Addresses travel over the control connections, so a stranger that
finds the port does not know the secret. (The data and the secret are not encrypted, see docs/cluster.md.)

One thread accepts, connects and authenticates (`comm/handshakes.py`). While a connection is missing, is broken, or an
answer on it is overdue, both ends attempt to connect again (`attempts.py`). `reachability.py` measures how long all
attempts have failed.
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
CALM, BUSY = 0.3, 0.1  # seconds between two checks of the connections, normally and while attempts are pending
LATE = 0.5  # seconds after `link` after which the member with the lower rank also attempts to connect
SURE = 0.5  # seconds of failed attempts to reach a member, after which all members on its machine are tried


class Address(NamedTuple):
    host: str
    port: int
    secret: str  # hexadecimal


class Mesh:
    """This member's connections to the other ranks below `size`. Any connection may be missing.

    Methods may be called from any thread and do not block."""

    def __init__(
        self,
        rank: int,
        size: int,
        host: str,
        pool: Pool,
        reachability: Reachability | None = None,
        keepalive: float | None = None,
    ):
        """keepalive: seconds without an answer from the other machine after which a connection breaks; None: the
        kernel's default."""
        self.rank = rank
        self._pool, self._reachability, self._keepalive = pool, reachability or Reachability(), keepalive
        self._secret = secrets.token_bytes(SECRET)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=max(128, size))
        self._listener.setblocking(False)
        self._host, port = self._listener.getsockname()[:2]
        self.address: bytes = json.dumps([self._host, port, self._secret.hex()]).encode()
        self._lock = threading.Lock()
        self._others = frozenset(range(size)) - {rank}
        self._connections: dict[int, Connection] = {}
        self._awaited: dict[int, list[Job]] = {other: [] for other in self._others}
        self._addresses: Mapping[int, Address] | None = None  # the members passed to `link`, and their addresses
        self._members: frozenset[int] = frozenset()  # members passed to `link` and not dropped by `keep`
        self._linked_at = 0.0
        self._closed = False
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # wakes the thread
        # Only the thread uses the following attributes.
        self._selector = selectors.DefaultSelector()
        self._handshakes = Handshakes(self._selector, self._listener, self._greet, self._add)
        self._attempts: dict[int, Attempts] = {}
        self._ticked = time.monotonic()
        threading.Thread(target=self._serve, name="recycle-mesh", daemon=True).start()

    def link(self, addresses: Mapping[int, bytes]) -> None:
        """Starts the connections to the members in `addresses` (rank -> address).

        May be called only once, so members cannot be added later."""
        self._members, self._linked_at = frozenset(addresses), time.monotonic()
        self._addresses = {rank: Address(*json.loads(address)) for rank, address in addresses.items()}
        self._ring()

    @property
    def is_linked(self) -> bool:
        return self._addresses is not None

    def linked(self, rank: int) -> Job | None:
        """A job that is done when the connection has been established, even if the connection has broken since then.

        None if the member was not passed to `link`. Each call returns a new job, because a generation releases its jobs
        at its end, and the next generation must wait again.
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
        """Keeps only `ranks` as members. Ends attempts to reach other members."""
        self._members = frozenset(ranks)
        self._reachability.keep(self._members)

    def __getitem__(self, rank: int) -> Connection:
        """The connection to a member. Raises KeyError until it is established."""
        return self._connections[rank]

    @property
    def received(self) -> int:
        """Bytes that all connections have received."""
        with self._lock:
            return sum(connection.received for connection in self._connections.values())

    def end(self, generation: int) -> None:
        """Drops all messages of this generation and of older generations."""
        with self._lock:
            connections = list(self._connections.values())
        for connection in connections:
            connection.end(generation)

    def close(self) -> None:
        """Closes the listener and every connection. Pending operations fail."""
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
                self._update(time.monotonic())
        for attempts in self._attempts.values():
            attempts.close()
        self._handshakes.close()
        self._selector.close()
        self._listener.close()
        with self._lock:  # in case `close` is about to write to the bell
            os.close(self._bell)

    def _update(self, now: float) -> None:
        """Ends attempts that are late or no longer needed, and starts attempts to reach members without a working
        connection."""
        # Counts at most 2 * CALM seconds since the last update, because this process was suspended if more have passed.
        passed, self._ticked = min(now - self._ticked, 2 * CALM), now
        self._handshakes.expire(now)
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
            self._attempts[rank].update(now)
        self._reachability.update(now)

    def _doubtful(self, addresses: Mapping[int, Address], now: float) -> set[int]:
        """Members whose connection may not work.

        If a member has been unreachable for SURE seconds, includes all members on its machine. The link between the
        machines may be cut, and idle connections detect this late. Links within this machine cannot be cut: a silent
        member here is dead or slow, and attempts from all to all would make it slower."""
        members = self._members & addresses.keys()
        doubtful = {rank for rank in members if self._is_doubtful(rank, now)}
        unreachable = {addresses[rank].host for rank in doubtful if self._reachability.failing(rank) > SURE}
        machines = unreachable - {self._host}
        return doubtful | {rank for rank in members if addresses[rank].host in machines}

    def _is_doubtful(self, rank: int, now: float) -> bool:
        connection = self._connections.get(rank)
        if connection is not None:
            return connection.is_over or connection.is_silent
        return rank < self.rank or now - self._linked_at > LATE

    def _reached(self, rank: int, at: Address, sock: socket.socket) -> None:
        """Handles a successful attempt. Its socket becomes the connection if there is none and this process must
        connect. Otherwise the attempt only proves that the member can be reached."""
        self._reachability.reached(rank)
        if rank > self.rank or rank in self._connections:
            sock.close()
            return
        try:
            # Does not block, because the buffer is empty.
            sock.sendall(HELLO.pack(self.rank, bytes.fromhex(at.secret)))
        except OSError:
            sock.close()
        else:
            self._add(sock, rank)

    def _greet(self, sock: socket.socket) -> Greeting:
        """Authenticates a connecting member and returns its rank. Rejects lower ranks, which must not connect."""
        rank, secret = HELLO.unpack((yield HELLO.size))
        if hmac.compare_digest(secret, self._secret) and rank in self._others and rank > self.rank:
            return rank
        raise ChannelClosed("not a member with a higher rank")

    def _add(self, sock: socket.socket, rank: int) -> None:
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
