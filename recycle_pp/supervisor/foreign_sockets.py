"""Changes options of another process's TCP connections.

    for sock in connections_to(os.getppid(), port=29500):
        with sock: set_keepalive(sock, 8.0)     # acts on the other process's connection

The kernel permits this to root and, if kernel.yama.ptrace_scope is 0, to processes of the same user (ptrace(2)).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

_PIDFD_GETFD = 438  # pidfd_getfd(2): the same number on all architectures that torch runs on


def connections_to(pid: int, port: int) -> Iterator[socket.socket]:
    """Duplicates of the process's TCP connections to `port` on any machine. Raises PermissionError if the kernel
    refuses."""
    pidfd = os.pidfd_open(pid)
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            sock = _duplicate(pidfd, int(entry.name)) if _is_socket(entry) else None
            if sock is None:
                continue
            if _peer_port(sock) == port:
                yield sock
            else:
                sock.close()
    finally:
        os.close(pidfd)


def _is_socket(entry: Path) -> bool:
    try:
        return os.readlink(entry).startswith("socket:")
    except FileNotFoundError:  # the process has just closed the descriptor
        return False


def _duplicate(pidfd: int, descriptor: int) -> socket.socket | None:
    """A duplicate of the socket; None if the process has just closed the socket."""
    found = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, pidfd, descriptor, 0)
    if found >= 0:
        return socket.socket(fileno=found)
    if ctypes.get_errno() in (errno.EBADF, errno.ESRCH):
        return None
    raise PermissionError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _peer_port(sock: socket.socket) -> int | None:
    if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
        return None
    with contextlib.suppress(OSError):  # a listening or broken socket has no peer
        return int(sock.getpeername()[1])
    return None
