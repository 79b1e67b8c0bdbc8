"""Connections that send nothing."""

import select


def still_open(sockets) -> int:
    """Number of these connections that the other end has not closed. At most a greeting has arrived on them."""
    poll = select.poll()
    for sock in sockets:
        poll.register(sock, select.POLLRDHUP)
    return len(sockets) - len(poll.poll(0))
