"""Measures the link from this machine to another one, over TCP and without torch.

with answering(token) as port: ...          # on each machine: answers in threads
link = probe("10.0.0.7", port, token, hello)     # LinkProbed(seconds, bandwidth), or the error
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from recycle_pp.linux.addresses import listening
from recycle_pp.timing import round_trips
from recycle_pp.wire.connection import Channel
from recycle_pp.wire.messages.machines import LinkProbed, MachineHello

CONNECT_SECONDS = 3.0
ANSWER_SECONDS = 20.0  # limit on one message of 4 MB
SIZE = struct.Struct(">Q")
ANSWER = b"."


@contextmanager
def answering(token: str) -> Iterator[int]:
    """Answers probes in threads until the context ends. Yields the port on which it listens."""
    with listening(0) as server:
        threading.Thread(target=_accept, args=(server, token), daemon=True).start()
        yield server.getsockname()[1]


def probe(address: str, port: int, token: str, hello: MachineHello) -> LinkProbed:
    """Measures the link to the machine that answers at `address` and `port`. Takes 30 ms within a data centre, and
    CONNECT_SECONDS if there is no answer."""
    try:
        channel = Channel.connect(address, port, token, hello, CONNECT_SECONDS)
        with channel.detach() as sock:
            sock.settimeout(ANSWER_SECONDS)
            return LinkProbed(*round_trips.measure(lambda size: _ask(sock, size)))
    except OSError as error:
        return LinkProbed(0.0, 0.0, error.strerror or str(error) or "no answer")


def _ask(sock: socket.socket, size: int) -> float:
    payload = bytes(size)
    begun = time.perf_counter()
    sock.sendall(SIZE.pack(size))
    sock.sendall(payload)
    if not sock.recv(len(ANSWER)):
        raise ConnectionError("the connection was closed")
    return time.perf_counter() - begun


def _accept(server: socket.socket, token: str) -> None:
    with suppress(OSError):  # the server is closed
        while True:
            sock, _ = server.accept()
            threading.Thread(target=_answer, args=(sock, token), daemon=True).start()


def _answer(sock: socket.socket, token: str) -> None:
    with suppress(OSError):  # the other end has closed, or is not a machine of this survey
        channel, _ = Channel.accept(sock, token)
        with channel.detach() as sock:
            buffer = memoryview(bytearray(round_trips.SIZES[-1]))
            while head := sock.recv(SIZE.size, socket.MSG_WAITALL):
                (size,) = SIZE.unpack(head)
                left = buffer[:size]
                while left:
                    left = left[sock.recv_into(left) or len(left) :]
                sock.sendall(ANSWER)
