"""Finds free ports of 127.0.0.1 for servers that are about to start.

free_ports(2)    # the first of two consecutive free ports
"""

import contextlib
import random
import socket

BELOW = 32_768  # Linux assigns higher ports to outgoing connections, which could take a port before the server does


def free_ports(count: int = 1) -> int:
    while True:
        first = random.SystemRandom().randrange(20_000, BELOW - count)
        with contextlib.suppress(OSError), contextlib.ExitStack() as servers:
            for port in range(first, first + count):
                servers.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
