"""Break the connections of a Gloo group from another thread, so that whoever blocks in it gets an error at once.

    shutdown_sockets(listener, peers)       # as often as sockets may still appear, from any thread
    answer_for_the_missing(listener, ranks) # connections that nobody will make any more

Gloo has no abort (torch 2.13: `abort()`, `shutdown()` and dropping the group leave a blocked operation blocked), but a
blocked operation raises within a millisecond or two when its socket is shut down. Which sockets are Gloo's is no guess:
a group has one listening address per member, published through its store, and each of its connections has the
listening address of one member at exactly one end. Sockets that connect to a peer have the peer's address as their
remote end; sockets that were accepted have our own as their local end. Listening sockets are left alone: shutting one
terminates the process (an error in Gloo's event thread that nothing catches).
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from collections.abc import Collection, Iterator

from recycle_pp.wire.keepalive import end_after_silence

Address = tuple[str, int]  # (ip, port), numeric


def shutdown_sockets(listener: Address, peers: Collection[Address]) -> int:
    """Shuts every connection of this process between `listener` (our end) and its peers' listening addresses.

    Returns how many there were. Takes tens of microseconds per open descriptor.
    """
    found = 0
    for sock in _sockets():
        with sock:
            if _belongs(sock, listener, peers):
                found += 1
                with contextlib.suppress(OSError):  # the other end was faster
                    sock.shutdown(socket.SHUT_RDWR)
    return found


def end_sockets_after_silence(listener: Address, peers: Collection[Address], seconds: float) -> None:
    """From now on these connections break when the other machine has not answered for so long."""
    for sock in _sockets():
        with sock:
            if _belongs(sock, listener, peers):
                end_after_silence(sock, seconds)


def answer_for_the_missing(listener: Address, ranks: Collection[int]) -> None:
    """Connects to our own listener in the name of `ranks`, and hangs up.

    Of two members one connects and the other waits to be connected (Gloo compares their addresses). Whoever waits for a
    member that died before it connected has no socket that could be shut. Gloo's handshake is the peer's rank as eight
    bytes; a connection that closes after it fails the waiting operation as a dead peer's would.
    """
    family = socket.AF_INET6 if ":" in listener[0] else socket.AF_INET
    for rank in ranks:
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.settimeout(1.0)
            try:
                sock.connect(listener)
                sock.sendall(struct.pack("=q", rank))
            except OSError:  # the listener is gone, and with it those who wait
                return


def gloo_address(value: bytes) -> Address:
    """The listening address in what a Gloo group of one device publishes in its store.

    Layout (gloo/transport/tcp/context.cc, address.h): size_t length, host name; size_t length, {sockaddr_storage,
    ssize_t}; then, without lazy connections, one ssize_t a pair. ValueError if it reads otherwise.
    """
    try:
        (hostname,) = struct.unpack_from("=Q", value)
        (length,) = struct.unpack_from("=Q", value, 8 + hostname)
        sockaddr = value[16 + hostname :]
        (family,) = struct.unpack_from("=H", sockaddr)
        (port,) = struct.unpack_from("!H", sockaddr, 2)
    except struct.error as error:
        raise ValueError(f"not the address of a Gloo group: {len(value)} bytes") from error
    if length == 136 and family == socket.AF_INET:
        return socket.inet_ntop(family, sockaddr[4:8]), port
    if length == 136 and family == socket.AF_INET6:
        return socket.inet_ntop(family, sockaddr[8:24]), port
    raise ValueError(f"not the address of a Gloo group: address family {family}, {length} bytes")


def nowhere(value: bytes) -> bytes:
    """Like `value`, for a member that does not exist: the highest of all addresses.

    Of two members the one with the higher address connects, so no socket is ever opened to this one.
    """
    start = 16 + struct.unpack_from("=Q", value)[0]
    family = struct.unpack_from("=H", value, start)[0]
    where, size = (start + 4, 4) if family == socket.AF_INET else (start + 8, 16)
    return value[:where] + b"\xff" * size + value[where + size :]


def _sockets() -> Iterator[socket.socket]:
    """A duplicate of every socket of this process: an original may be closed, and its number reused, meanwhile."""
    for name in os.listdir("/proc/self/fd"):
        try:
            fd = os.dup(int(name))
        except OSError:
            continue
        try:
            sock = socket.socket(fileno=fd) if stat.S_ISSOCK(os.fstat(fd).st_mode) else None
        except OSError:
            sock = None
        if sock is None:
            os.close(fd)
        else:
            yield sock


def _belongs(sock: socket.socket, listener: Address, peers: Collection[Address]) -> bool:
    if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
        return False
    if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return False
    if sock.getsockname()[:2] == listener:
        return True
    try:
        return sock.getpeername()[:2] in peers
    except OSError:  # not connected
        return False
