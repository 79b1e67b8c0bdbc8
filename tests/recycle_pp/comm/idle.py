"""Connections that say nothing."""

import select


def still_open(sockets) -> int:
    """How many of these, to which nobody sends anything but a greeting, the other end has not closed."""
    poll = select.poll()
    for sock in sockets:
        poll.register(sock, select.POLLRDHUP)
    return len(sockets) - len(poll.poll(0))
