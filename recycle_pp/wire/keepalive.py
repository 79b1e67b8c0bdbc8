"""A connection whose other machine does not answer breaks after a while, instead of after a quarter of an hour.

    set_keepalive(sock, seconds=10)

The other machine's kernel answers for a process that hangs or is paused, too: this is about machines and networks only.
"""

from __future__ import annotations

import socket


def set_keepalive(sock: socket.socket, seconds: float) -> None:
    """Linux (tcp(7)): what was sent must be acknowledged in that time; where nothing is to be sent, the kernel asks."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, round(seconds / 4)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, round(seconds / 4)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * seconds))
