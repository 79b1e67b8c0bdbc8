"""A worker's connection to the coordinator, wherever that is.

    client = CoordinatorClient(spec)       # in the worker; the spec says where the first coordinator listens
    message = client.recv()                # blocks; in one thread
    client.send(vote)                      # from any thread; never fails
    client.state = participant.state       # what a later coordinator is told first

When the coordinator is lost the worker's supervisor says where the next one is, on the pipe that the spec came through.
It connects there and begins with a `State`, which holds the last message of each lasting kind, of `Measured` two.
Others that were on their way are gone: they belong to a generation that is void. Where only this connection broke, or
whoever is called upon does not coordinate yet, the same place is tried again.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress

import msgspec

from recycle_pp.wire.connection import Channel
from recycle_pp.wire.messages.handshake import WorkerHello
from recycle_pp.wire.messages.table import Message, is_lasting
from recycle_pp.wire.messages.workers import TO_WORKER, Measured, State, WorkerWelcome
from recycle_pp.wire.worker_spec import WorkerSpec, told_later

_CONNECT = 1.0  # seconds: shorter than a new coordinator waits, which the supervisor may have named meanwhile
_AGAIN = 0.1  # seconds until a coordinator that could not be reached is tried once more


class CoordinatorClient:
    def __init__(self, spec: WorkerSpec) -> None:
        self.state: Callable[[], State] = State  # before it has any
        self._spec, self._place = spec, (spec.host, spec.port)
        self._places: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        self._said: dict[tuple[type[Message], int], Message] = {}
        self._sending = threading.Lock()
        self._welcomed = False
        self._keepalive: float | None = None
        self._channel: Channel | None = None
        # Before it is connected: the coordinator may have been lost while this process imported what it needs.
        threading.Thread(target=self._hear_supervisor, name="supervisor", daemon=True).start()
        self._channel = self._connect()

    @property
    def local_host(self) -> str:
        """The address of this machine that the coordinator sees."""
        assert self._channel is not None
        return self._channel.local_host

    def set_keepalive(self, seconds: float) -> None:
        """See Channel."""
        self._keepalive = seconds
        assert self._channel is not None
        self._channel.set_keepalive(seconds)

    def recv(self) -> Message:
        while True:
            channel = self._channel
            assert channel is not None
            with suppress(OSError):
                message = channel.recv(TO_WORKER)
                self._welcomed = self._welcomed or isinstance(message, WorkerWelcome)
                return message
            channel.close()
            with suppress(queue.Empty):
                self._place = self._places.get(timeout=_AGAIN)
            self._move()

    def send(self, message: Message) -> None:
        with self._sending:
            if is_lasting(message):
                # Of steps two: whoever is ahead may have measured the next one as the newest commit gets lost.
                kind = type(message), message.step % 2 if isinstance(message, Measured) else 0
                self._said.pop(kind, None)  # the newest comes last
                self._said[kind] = message
            assert self._channel is not None
            with suppress(OSError):
                self._channel.send(message)

    def _move(self) -> None:
        """Nobody sends until the new coordinator has got the state."""
        channel = self._connect()
        if self._keepalive is not None:
            channel.set_keepalive(self._keepalive)
        with self._sending:
            with suppress(OSError):
                if self._welcomed:
                    channel.send(msgspec.structs.replace(self.state(), said=list(self._said.values())))
            self._channel = channel

    def _connect(self) -> Channel:
        while True:
            with suppress(queue.Empty):
                while True:
                    self._place = self._places.get_nowait()
            with suppress(OSError):
                hello = WorkerHello(self._spec.rank, self._spec.incarnation, moved=self._welcomed)
                return Channel.connect(*self._place, self._spec.token, hello, _CONNECT)
            with suppress(queue.Empty):
                self._place = self._places.get(timeout=_AGAIN)

    def _hear_supervisor(self) -> None:
        for place in told_later():
            self._places.put((place.host, place.port))
            if self._channel is not None:
                self._channel.close()  # the last coordinator may be silent rather than gone
