"""Messages between two workers over one TCP connection, matched by generation and tag.

    connection = Connection(sock, pool)                      # connected; starts the reading thread
    received = connection.receive(tensor, generation, tag)   # a Job: done when the message is in the tensor
    sent = connection.send(tensor, generation, tag)          # a Job: done when the kernel has accepted the message
    connection.end(generation)                               # drops messages of this generation and of older ones
    connection.close()                                       # all pending jobs fail

A frame consists of generation, tag, number of bytes, and the tensor's memory, in the byte order of the machine.
Messages with the same generation and tag arrive in the order in which they were sent. The reading thread never waits
for `receive`. It reads early messages into separate memory, so that a late receive does not delay other messages. The
plan of a step bounds the size of this memory.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections import defaultdict, deque

from torch import Tensor

from recycle_pp.comm.tensor_bytes import tensor_bytes
from recycle_pp.comm.waiting import Job, Pool
from recycle_pp.wire.keepalive import arrived, is_silent, set_keepalive

FRAME = struct.Struct("=qqq")  # generation, tag, number of bytes that follow
MAX_MESSAGE = 1 << 40  # bytes
SCRAP = 1 << 20  # bytes read at a time from a dropped message

Key = tuple[int, int]  # generation, tag


class ConnectionLost(RuntimeError):
    """The peer's process has ended, its machine does not respond, or this side has closed the connection."""


class Connection:
    """One TCP connection to a peer. Public methods may be called from any thread, and do not block."""

    def __init__(self, sock: socket.socket, pool: Pool):
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._pool = sock, pool
        self._arriving = threading.Lock()  # guards the next four attributes
        self._posted: dict[Key, deque[tuple[memoryview, Job]]] = defaultdict(deque)
        self._early: dict[Key, deque[bytearray]] = defaultdict(deque)
        self._over = -1  # highest generation that has ended
        self._error: ConnectionLost | None = None
        self._leaving = threading.Lock()  # guards the next attribute and the order of writes
        self._unsent: deque[tuple[list[memoryview], Job]] = deque()
        threading.Thread(target=self._read, name="recycle-read", daemon=True).start()

    def send(self, tensor: Tensor, generation: int, tag: int) -> Job:
        """Sends a contiguous CPU tensor. The caller must not write to the tensor until the job is done.

        The calling thread sends the bytes that the kernel accepts immediately. A thread of the pool sends the rest.
        """
        data, job = tensor_bytes(tensor), Job()
        frame = memoryview(FRAME.pack(generation, tag, data.nbytes))
        with self._leaving:
            if self._error is not None:
                job.finish(self._error)
                return job
            rest = [frame, data] if self._unsent else self._write_at_once([frame, data])
            if rest:
                self._unsent.append((rest, job))
                if len(self._unsent) == 1:
                    self._pool.start(self._write)
                return job
        job.finish()
        return job

    def receive(self, tensor: Tensor, generation: int, tag: int) -> Job:
        """Receives into a contiguous CPU tensor of exactly the sent size. The caller must not use the tensor until the
        job is done."""
        data, job = tensor_bytes(tensor), Job()
        key = generation, tag
        with self._arriving:
            early = self._early.get(key)
            if not early:
                if self._error is None and generation > self._over:
                    self._posted[key].append((data, job))
                else:
                    job.finish(self._error or ConnectionLost(f"generation {generation} has ended"))
                return job
            message = early.popleft()
            if not early:
                del self._early[key]
        if len(message) == data.nbytes:
            data[:] = message
            job.finish()
        else:
            job.finish(_wrong_size(key, len(message), data.nbytes))
        return job

    def end(self, generation: int) -> None:
        """Drops all messages of this and older generations, including early messages, messages for which a receive is
        posted, and messages that arrive later."""
        with self._arriving:
            self._over = max(self._over, generation)
            for held in (self._posted, self._early):
                for key in [key for key in held if key[0] <= self._over]:
                    del held[key]  # type: ignore[attr-defined]

    def set_keepalive(self, seconds: float) -> None:
        """Makes the connection break if the other machine does not respond for `seconds`, because it is dead or the
        network is cut."""
        with contextlib.suppress(OSError):  # the connection is already broken
            set_keepalive(self._socket, seconds)

    @property
    def is_over(self) -> bool:
        """Whether the connection is broken or closed."""
        return self._error is not None

    @property
    def is_silent(self) -> bool:
        """Whether an answer from the other machine is overdue."""
        try:
            return is_silent(self._socket)
        except OSError:
            return True  # the connection has just broken

    @property
    def received(self) -> int:
        """Bytes that have arrived so far; 0 if the connection is closed. Grows while a long message arrives."""
        try:
            return arrived(self._socket)
        except OSError:
            return 0

    def close(self) -> None:
        self._fail(ConnectionLost("the connection is closed"))

    # -- writing ---------------------------------------------------------------------------------------------------

    def _write_at_once(self, parts: list[memoryview]) -> list[memoryview]:
        """Returns the parts that the kernel has not accepted. Ignores errors, because the reading thread detects broken
        connections."""
        try:
            done = self._socket.sendmsg(parts, (), socket.MSG_DONTWAIT)
        except OSError:
            done = 0
        return _after(parts, done)

    def _write(self) -> None:
        """Sends the queued messages. Runs in a thread of the pool until the queue is empty."""
        while True:
            with self._leaving:
                parts, job = self._unsent[0]
            error: ConnectionLost | None = None
            try:
                for part in parts:
                    self._socket.sendall(part)
            except OSError as failed:
                error = ConnectionLost(str(failed))
                self._fail(error)
            with self._leaving:
                self._unsent.popleft()
                over = not self._unsent
                if over and self._error is not None:
                    self._socket.close()
            job.finish(error)
            if over:
                return

    # -- reading ---------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        frame = memoryview(bytearray(FRAME.size))
        try:
            while True:
                self._fill(frame)
                generation, tag, count = FRAME.unpack(frame)
                if not 0 <= count <= MAX_MESSAGE:
                    raise ConnectionLost(f"invalid message size: {count} bytes")
                self._take((generation, tag), count)
        except (OSError, ConnectionLost) as error:
            self._fail(ConnectionLost(str(error)))
        with self._leaving:
            if not self._unsent:  # otherwise the writing thread closes the socket
                self._socket.close()

    def _take(self, key: Key, count: int) -> None:
        """Reads one message into its destination."""
        with self._arriving:
            unwanted = key[0] <= self._over
            posted = self._next(key)
        if posted is not None and posted[0].nbytes == count:
            data, job = posted
            try:
                self._fill(data)
            except (OSError, ConnectionLost) as error:
                job.finish(ConnectionLost(str(error)))
                raise
            job.finish()
        elif posted is not None:
            self._skip(count)
            posted[1].finish(_wrong_size(key, count, posted[0].nbytes))
        elif unwanted:
            self._skip(count)
        else:
            self._take_early(key, count)

    def _take_early(self, key: Key, count: int) -> None:
        message = bytearray(count)
        self._fill(memoryview(message))
        with self._arriving:
            posted = self._next(key)  # a receive that was posted while the message was read
            if posted is None:
                if key[0] > self._over:
                    self._early[key].append(message)
                return
        data, job = posted
        if len(data) == count:
            data[:] = message
            job.finish()
        else:
            job.finish(_wrong_size(key, count, data.nbytes))

    def _next(self, key: Key) -> tuple[memoryview, Job] | None:
        """Removes and returns the oldest posted receive of this key. The caller must hold `_arriving`."""
        posted = self._posted.get(key)
        if not posted:
            return None
        first = posted.popleft()
        if not posted:
            del self._posted[key]
        return first

    def _fill(self, data: memoryview) -> None:
        done = 0
        while done < len(data):
            count = self._socket.recv_into(data[done:], 0, socket.MSG_WAITALL)
            if count == 0:
                raise ConnectionLost("the peer closed the connection")
            done += count

    def _skip(self, count: int) -> None:
        scrap = memoryview(bytearray(min(count, SCRAP)))
        while count:
            self._fill(scrap[:count])
            count -= min(count, SCRAP)

    def _fail(self, error: ConnectionLost) -> None:
        """Breaks the connection, so that all pending operations fail with this error. Ignores later errors."""
        with self._arriving:
            if self._error is not None:
                return
            self._error = error
            jobs = [job for posted in self._posted.values() for _, job in posted]
            self._posted.clear()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the reading and writing threads
        for job in jobs:
            job.finish(error)


def _after(parts: list[memoryview], done: int) -> list[memoryview]:
    """The rest of `parts`, after the first `done` bytes of all parts together."""
    left = []
    for part in parts:
        if done < len(part):
            left.append(part[done:])
        done = max(0, done - len(part))
    return left


def _wrong_size(key: Key, count: int, expected: int) -> RuntimeError:
    return RuntimeError(f"generation {key[0]}, tag {key[1]}: received {count} bytes, expected {expected}")
