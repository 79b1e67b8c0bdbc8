"""A worker's connection to the current coordinator.

    client = CoordinatorClient(spec)       # the spec contains the address of the first coordinator
    message = client.recv()                # blocks; only one thread may call it
    client.send(vote)                      # from any thread; never fails
    client.state = participant.state       # a function; its result is the first message to a later coordinator

When the coordinator is lost, the worker's supervisor sends the address of the next coordinator through the pipe that
delivered the worker's spec. The client connects and sends a `State`, which repeats the last message of each lasting
type and the last two `Measured`. Other unsent messages are dropped, because they belong to an old generation. If only
the connection broke, or the process at the address is not a coordinator yet, the client retries the same address.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import msgspec

from recycle_pp.wire.connection import Channel
from recycle_pp.wire.messages.handshake import WorkerHello
from recycle_pp.wire.messages.lifecycle import WorkerWelcome
from recycle_pp.wire.messages.steps import Measured
from recycle_pp.wire.messages.table import Message, is_lasting
from recycle_pp.wire.messages.workers import TO_WORKER, State
from recycle_pp.wire.worker_spec import WorkerSpec, later_addresses

_CONNECT = 1.0  # seconds until a connection attempt times out; shorter than a new coordinator waits for its workers
_AGAIN = 0.1  # seconds until the next attempt


class CoordinatorClient:
    def __init__(self, spec: WorkerSpec) -> None:
        self.state: Callable[[], State] = State
        self._spec, self._place = spec, (spec.host, spec.port)
        self._places: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        self._lasting: dict[tuple[type[Message], int], Message] = {}  # messages to repeat to a later coordinator
        self._sending = threading.Lock()
        self._welcomed = False
        self._keepalive: float | None = None
        self._channel: Channel | None = None
        # Starts before connecting, because the coordinator may have died during the imports of this process.
        threading.Thread(target=self._follow_supervisor, name="supervisor", daemon=True).start()
        self._channel = self._connect()

    @property
    def local_host(self) -> str:
        """The address of this machine on the connection to the coordinator."""
        assert self._channel is not None
        return self._channel.local_host

    def set_keepalive(self, seconds: float) -> None:
        """Calls `Channel.set_keepalive` for this connection and for all later ones."""
        self._keepalive = seconds
        assert self._channel is not None
        self._channel.set_keepalive(seconds)

    def recv(self) -> Message:
        while True:
            channel = self._channel
            assert channel is not None
            with suppress(OSError):
                message = channel.recv(TO_WORKER)
                if isinstance(message, WorkerWelcome):
                    self._welcomed = True
                    self.state = partial(State, committed=message.resume - 1)  # until the session sets it
                return message
            channel.close()
            with suppress(queue.Empty):
                self._place = self._places.get(timeout=_AGAIN)
            self._move()

    def send(self, message: Message) -> None:
        with self._sending:
            if is_lasting(message):
                # Keeps two `Measured`, because the commit of a step may be lost after this worker has measured the next
                # step.
                kind = type(message), message.step % 2 if isinstance(message, Measured) else 0
                self._lasting.pop(kind, None)  # moves the kind to the end: messages are repeated in sending order
                self._lasting[kind] = message
            assert self._channel is not None
            with suppress(OSError):
                self._channel.send(message)

    def _move(self) -> None:
        """Connects to the next coordinator. Blocks `send` until the state is sent."""
        channel = self._connect()
        if self._keepalive is not None:
            channel.set_keepalive(self._keepalive)
        with self._sending:
            with suppress(OSError):
                if self._welcomed:
                    channel.send(msgspec.structs.replace(self.state(), said=list(self._lasting.values())))
            self._channel = channel

    def _connect(self) -> Channel:
        while True:
            with suppress(queue.Empty):
                while True:
                    self._place = self._places.get_nowait()
            with suppress(OSError):
                spec = self._spec
                hello = WorkerHello(spec.rank, spec.incarnation, moved=self._welcomed, job_id=spec.job_id)
                return Channel.connect(*self._place, self._spec.token, hello, _CONNECT)
            with suppress(queue.Empty):
                self._place = self._places.get(timeout=_AGAIN)

    def _follow_supervisor(self) -> None:
        for place in later_addresses():
            self._places.put((place.host, place.port))
            if self._channel is not None:
                self._channel.close()  # ends a blocked `recv`, because the previous coordinator may hang
