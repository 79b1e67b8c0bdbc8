"""Says every 10 s for whom this node waits at the start, and why.

    waiting = Waiting(launch)
    waiting.say("10.0.0.1:29501", error)       # as often as it was tried; the node's first rank prints, now and then
    why(error)                                 # in words

For whom the coordinator itself waits says `coordinator.arrivals`.
"""

from __future__ import annotations

import socket
import sys
import time

from recycle_pp.wire.launch import Launch

SECONDS = 10.0


class Waiting:
    def __init__(self, launch: Launch) -> None:
        self._launch, self._begun = launch, time.monotonic()
        self._said = self._begun

    def say(self, where: str, error: OSError) -> None:
        """where: HOST:PORT of the coordinator; error: of the last try to reach it."""
        now = time.monotonic()
        if self._launch.local_rank > 0 or self._launch.one_node or now < self._said + SECONDS:
            return
        self._said = now
        node = f"node {self._launch.agent} ({socket.gethostname()})"
        print(
            f"recycle_pp: {node} has waited {now - self._begun:.0f} s for rank 0's node at {where}: {why(error)}",
            file=sys.stderr, flush=True,
        )  # fmt: skip


def why(error: OSError) -> str:
    """Why the coordinator cannot be reached, and what to look at."""
    match error:
        case ConnectionRefusedError():
            return "nothing listens there: that node is not ready yet, or has ended, or this is a wrong address"
        case socket.gaierror():
            return f"this host name cannot be resolved ({error.strerror})"
        case TimeoutError():
            return "no answer: a wrong address, a firewall in between, or another program listens there"
        case _:
            return error.strerror or str(error)
