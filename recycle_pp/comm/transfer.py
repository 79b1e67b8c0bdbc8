"""Sends named tensors (the state for a rejoining worker) to another worker over a separate TCP connection.

    receiver = Receiver("127.0.0.1", token)                    # listens at once; (host, port) in receiver.address
    stream = receiver.accept(timeout=60)                       # Stream, authenticated
    about, tensors = stream.receive()                          # blocks; raises TransferError if the connection is lost

    stream = connect(address, token, timeout=10)               # the donor
    stream.send(StepGradient(...), {"gradient": tensor})       # returns when the kernel has accepted all bytes

Either side may send, any number of times. `close` may be called from any thread and ends blocked calls. Each transfer
is a frame with a `Parcel` (see `wire.messages.states`), followed by the raw bytes of the tensors, in the byte order of
the machine. A connection starts with the mutual authentication of `wire.authentication`. Received data is never
unpickled or evaluated.
"""

from __future__ import annotations

import contextlib
import math
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from recycle_pp.linux.addresses import address_of
from recycle_pp.wire.authentication import Verifier, prove
from recycle_pp.wire.frames import LENGTH, MAX_FRAME, MAX_HANDSHAKE_FRAME, ChannelClosed, encode, length_of
from recycle_pp.wire.keepalive import set_keepalive
from recycle_pp.wire.launch import joined
from recycle_pp.wire.messages.handshake import TO_SERVER
from recycle_pp.wire.messages.states import (
    TO_JOINER,
    TO_RECEIVER,
    About,
    DonorHello,
    Parcel,
    TensorHeader,
)
from recycle_pp.wire.messages.table import Message, Vocabulary

from .handshakes import Greeting, Handshakes
from .tensor_bytes import tensor_bytes

MAX_TENSOR = 1 << 40  # bytes
LOOK_SECONDS = 0.3  # seconds between two checks for connections that authenticate too slowly
CHUNK = 4 << 20  # bytes per system call; the stream's timeout limits each call

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32, torch.float64, torch.float16, torch.bfloat16,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip


class TransferError(ConnectionError):
    """The stream is unusable, because the other side has died, has timed out, or uses another format."""


def connect(
    address: tuple[str, int] | list[Any],
    token: str,
    timeout: float = 10.0,
    idle: float = 60.0,
    keepalive: float | None = None,
) -> Stream:
    """Connects to the receiver at (host, port) and authenticates. Raises TransferError if that fails.

    timeout: seconds for the connection, and for each message of the authentication
    idle: seconds without a byte after which a receive or send of the stream fails
    keepalive: seconds after which the stream breaks if the other machine does not answer; None: never
    """
    host, port = address
    try:
        sock = socket.create_connection((host, port), timeout)
    except OSError as error:
        raise TransferError(f"no connection to {joined(host, port)}: {error}") from error
    stream = Stream(_tuned(sock, keepalive), timeout)
    try:
        prove(token, DonorHello(), stream._send_message, stream._receive_message)
    except ChannelClosed as error:
        raise stream._broken(str(error)) from error
    sock.settimeout(idle)
    return stream


def _tuned(sock: socket.socket, keepalive: float | None) -> socket.socket:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if keepalive is not None:
        set_keepalive(sock, keepalive)
    return sock


class Receiver:
    """Listens on a free port of `interface` (an address, a host name or the name of a network interface).

    keepalive: see `connect`
    """

    def __init__(self, interface: str, token: str, keepalive: float | None = None):
        host = address_of(interface)
        self._listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._listener.setblocking(False)
        self._token, self._keepalive, self._closed = token, keepalive, False
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._accepting = threading.Lock()  # guards the next three attributes
        self._selector = selectors.DefaultSelector()
        self._handshakes = Handshakes(self._selector, self._listener, self._greet, self._admit)
        self._admitted: deque[socket.socket] = deque()

    def accept(self, timeout: float = 60.0, idle: float = 60.0) -> Stream:
        """The next connection that authenticates. Raises TransferError after `timeout` seconds, or after `close`.

        Connections that do not authenticate are closed (`comm/handshakes.py`) and cause no delay.

        idle: seconds without a byte after which a receive or send of the stream fails
        """
        deadline = time.monotonic() + timeout
        with self._accepting:
            while not self._admitted and not self._closed and time.monotonic() < deadline:
                for key, _ in self._selector.select(min(LOOK_SECONDS, max(0.0, deadline - time.monotonic()))):
                    key.data()
                self._handshakes.expire(time.monotonic())
            if self._closed or not self._admitted:
                raise TransferError(f"no peer has connected to {self.address[0]}:{self.address[1]}")
            sock = self._admitted.popleft()
        return Stream(_tuned(sock, self._keepalive), idle)

    def close(self) -> None:
        """Closes the receiver, from any thread. A pending `accept` raises TransferError at once."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in `accept`
        with self._accepting:
            self._handshakes.close()
            for sock in self._admitted:
                sock.close()
            self._admitted.clear()
            self._selector.close()
            self._listener.close()

    def _greet(self, sock: socket.socket) -> Greeting:
        verifier = Verifier(self._token, TO_RECEIVER)
        sock.sendall(encode(verifier.challenge))  # does not block, because the buffer is empty
        length = length_of((yield LENGTH.size), MAX_HANDSHAKE_FRAME)
        accepted = verifier.judge(TO_SERVER.decode((yield length)))
        sock.sendall(encode(accepted))
        return verifier.hello

    def _admit(self, sock: socket.socket, hello: Message) -> None:
        self._admitted.append(sock)


class Stream(contextlib.AbstractContextManager["Stream"]):
    """One end of an authenticated connection. One thread may send while another receives."""

    def __init__(self, sock: socket.socket, timeout: float):
        sock.settimeout(timeout)
        self._socket = sock

    def send(self, about: About, tensors: Mapping[str, Tensor]) -> None:
        """Sends the tensors in the given order. They must not change until `send` returns.

        Raises ValueError if the header with the tensors' names and shapes is larger than 16 MiB."""
        headers = [TensorHeader(name, _name(tensor.dtype), list(tensor.shape)) for name, tensor in tensors.items()]
        self._send_message(Parcel(about, headers))
        for tensor in tensors.values():
            self._write(tensor_bytes(tensor.detach().to("cpu", memory_format=torch.contiguous_format).contiguous()))

    def receive(self) -> tuple[About, dict[str, Tensor]]:
        """The arguments of the other side's next `send`: (about, tensors on the CPU). Blocks until they arrive."""
        try:
            parcel = self._receive_message(TO_JOINER, MAX_FRAME)
            assert isinstance(parcel, Parcel)  # a joiner receives no other message
            empty = {header.name: _empty(header) for header in parcel.tensors}
        except (ChannelClosed, ValueError) as error:
            raise self._broken(f"invalid header: {error}") from error
        for tensor in empty.values():
            self._fill(tensor_bytes(tensor))
        return parcel.about, empty

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send_message(self, message: Message) -> None:
        self._write(memoryview(encode(message)))

    def _receive_message(self, vocabulary: Vocabulary, limit: int = MAX_HANDSHAKE_FRAME) -> Message:
        return vocabulary.decode(self._read(length_of(self._read(LENGTH.size), limit)))

    def _write(self, data: memoryview) -> None:
        try:
            for start in range(0, len(data), CHUNK):
                self._socket.sendall(data[start : start + CHUNK])
        except OSError as error:
            raise self._broken(str(error)) from error

    def _read(self, count: int) -> bytes:
        data = bytearray(count)
        self._fill(memoryview(data))
        return bytes(data)

    def _fill(self, data: memoryview) -> None:
        done = 0
        while done < len(data):
            try:
                count = self._socket.recv_into(data[done : done + CHUNK])
            except OSError as error:
                raise self._broken(str(error)) from error
            if count == 0:
                raise self._broken("the other side closed the connection")
            done += count

    def _broken(self, reason: str) -> TransferError:
        self.close()
        return TransferError(f"state transfer: {reason}")


def _name(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError(f"cannot transfer dtype {name}; supported: {', '.join(_DTYPES)}")
    return name


def _empty(header: TensorHeader) -> Tensor:
    name, shape = header.dtype, header.shape
    if name not in _DTYPES or any(size < 0 for size in shape):
        raise ValueError(f"cannot receive a tensor of dtype {name} and shape {shape}")
    if math.prod(shape) * _DTYPES[name].itemsize > MAX_TENSOR:
        raise ValueError(f"a tensor of dtype {name} and shape {shape} has more than {MAX_TENSOR} bytes")
    return torch.empty(shape, dtype=_DTYPES[name])
