"""One TCP connection with each other worker, kept as long as both of them live.

    mesh = Mesh(rank, size, host="127.0.0.1", pool=pool)     # listens; waits for nobody
    mesh.address                                             # bytes: what the other members need
    mesh.link({2: address, 5: address})                      # starts these connections, once
    mesh.linked(2)                                           # a Job: done when that connection stands
    mesh[2].send(tensor, generation, tag)

Of two members the one with the higher rank connects. An address carries a secret of its mesh, which whoever connects
says first: addresses travel over the control connections, so a stranger who finds the port does not know it. (The data
are not encrypted, nor is the secret: docs/cluster.md.)
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Mapping
from functools import partial

from recycle_pp.comm.waiting import Job, Pool

from .connection import Connection, ConnectionLost

SECRET = 16  # bytes
HELLO = struct.Struct(f"!I{SECRET}s")  # rank, secret
HELLO_SECONDS = 30.0  # until a connection is refused, or made and its secret said; who waits for it gives up sooner
RETRY_SECONDS = 0.05  # after an accept that failed, as for want of descriptors


class Mesh:
    """Up to `size` members, of whom any may be missing. Methods may be called from any thread; only `link`'s threads
    block."""

    def __init__(self, rank: int, size: int, host: str, pool: Pool):
        self.rank = rank
        self._pool = pool
        self._secret = secrets.token_bytes(SECRET)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=max(128, size))
        self.address: bytes = json.dumps([*self._listener.getsockname()[:2], self._secret.hex()]).encode()
        self._lock = threading.Lock()
        self._others = frozenset(range(size)) - {rank}
        self._connections: dict[int, Connection] = {}
        self._failed: dict[int, ConnectionLost] = {}
        self._awaited: dict[int, list[Job]] = {other: [] for other in self._others}
        self._members: frozenset[int] | None = None  # whom `link` was told
        self._closed = False
        threading.Thread(target=self._accept, name="recycle-accept", daemon=True).start()

    def link(self, addresses: Mapping[int, bytes]) -> None:
        """Starts the connections to the members at `addresses`, by rank; the others are missing for good. Once."""
        self._members = frozenset(addresses)
        for rank, address in addresses.items():
            if rank < self.rank:
                self._pool.start(partial(self._connect, rank, address))

    @property
    def is_linked(self) -> bool:
        return self._members is not None

    def linked(self, rank: int) -> Job | None:
        """Done when the connection stands (its error, if it failed); None if `link` was not told this member.

        A job of the caller's own: a generation that ends releases it, and the next one has to wait again.
        """
        if self._members is None or rank not in self._members:
            return None
        job = Job()
        with self._lock:
            if rank in self._connections or rank in self._failed:
                job.finish(self._failed.get(rank))
            else:
                self._awaited[rank].append(job)
        return job

    def __getitem__(self, rank: int) -> Connection:
        """KeyError until it stands."""
        return self._connections[rank]

    def end(self, generation: int) -> None:
        """Lets go of the messages of this generation and of older ones."""
        with self._lock:
            connections = list(self._connections.values())
        for connection in connections:
            connection.end(generation)

    def set_keepalive(self, seconds: float) -> None:
        """Connections that stand break when the other machine has not answered for so long, as after a cut."""
        with self._lock:
            connections = list(self._connections.values())
        for connection in connections:
            connection.set_keepalive(seconds)

    def close(self) -> None:
        """Closes the listener and every connection: what is under way fails."""
        with self._lock:
            self._closed = True
            connections = list(self._connections.values())
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        for connection in connections:
            connection.close()

    def _connect(self, rank: int, address: bytes) -> None:
        host, port, secret = json.loads(address)
        try:
            sock = socket.create_connection((host, port), HELLO_SECONDS)
            sock.sendall(HELLO.pack(self.rank, bytes.fromhex(secret)))
        except OSError as error:
            self._end_wait(rank, ConnectionLost(f"no connection to {host}:{port}: {error}"))
        else:
            self._add(rank, sock)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(RETRY_SECONDS)
                continue
            self._pool.start(partial(self._welcome, sock))

    def _welcome(self, sock: socket.socket) -> None:
        """Whoever does not say a member's rank and the secret in time is hung up on."""
        sock.settimeout(HELLO_SECONDS)
        try:
            hello = b""
            while len(hello) < HELLO.size and (part := sock.recv(HELLO.size - len(hello))):
                hello += part
            rank, secret = HELLO.unpack(hello)
        except (OSError, struct.error):
            sock.close()
            return
        if not hmac.compare_digest(secret, self._secret) or rank not in self._others or rank < self.rank:
            sock.close()
            return
        self._add(rank, sock)

    def _add(self, rank: int, sock: socket.socket) -> None:
        with self._lock:
            if self._closed or rank in self._connections:
                sock.close()
                return
            self._connections[rank] = Connection(sock, self._pool)
        self._end_wait(rank)

    def _end_wait(self, rank: int, error: ConnectionLost | None = None) -> None:
        with self._lock:
            if error is not None:
                self._failed[rank] = error
            awaited, self._awaited[rank] = self._awaited[rank], []
        for job in awaited:
            job.finish(error)
