"""Makes a connection break soon after the other machine stops answering. By default Linux waits a quarter of an hour.

    set_keepalive(sock, seconds=10)    # breaks after 10 seconds
    is_silent(sock)                    # whether an answer from the other machine is overdue
    arrived(sock)                      # bytes that have arrived from the other machine so far

Detects only dead machines and broken networks. If the other process hangs or is paused, the kernel of its machine still
answers.
"""

from __future__ import annotations

import socket
import sys


def set_keepalive(sock: socket.socket, seconds: float) -> None:
    """Makes the connection break if sent data or keepalive probes are not acknowledged for `seconds`. Linux only, see
    tcp(7)."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, round(seconds / 4)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, round(seconds / 4)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * seconds))


def is_silent(sock: socket.socket) -> bool:
    """Whether the kernel is waiting for the answer to a retransmission or a keepalive probe.

    Raises OSError if the socket is closed. See tcp(7), TCP_INFO: the third and fourth byte of `struct tcp_info` are
    `tcpi_retransmits` and `tcpi_probes`.
    """
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8)
    return info[2] > 0 or info[3] > 0


def arrived(sock: socket.socket) -> int:
    """The bytes that this machine's kernel has received on the connection, including those that have not been read yet.

    Raises OSError if the socket is closed. `tcpi_bytes_received` has the bytes 128 to 135 of `struct tcp_info`.
    """
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
    return int.from_bytes(info[128:], sys.byteorder)
