"""A connection whose other machine does not answer breaks after a while, instead of after a quarter of an hour.

    set_keepalive(sock, seconds=10)
    is_silent(sock)                    # the other machine leaves something unanswered at present

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


def is_silent(sock: socket.socket) -> bool:
    """Whether the kernel has sent something again, or has asked, and has no answer yet. OSError if it is closed.

    tcp(7), TCP_INFO: the third and fourth byte of `struct tcp_info` are `tcpi_retransmits` and `tcpi_probes`.
    """
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8)
    return info[2] > 0 or info[3] > 0
