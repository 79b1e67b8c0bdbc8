"""Measures the latency and bandwidth of a link by round trips of messages.

    seconds, bandwidth = measure(ask)     # latency in one direction; bytes per second

`ask(n)` sends n bytes, receives a small answer, and returns the seconds that this took. `measure` takes 10 ms within a
data centre, and 0.7 s if a round trip takes 100 ms.
"""

from __future__ import annotations

import time
from collections.abc import Callable

LEAST_ROUNDS, ROUNDS = 4, 8  # round trips of a small message; a busy machine delays most of them
ROUND_SECONDS = 0.02  # time limit for starting more round trips
SIZES = (1 << 16, 1 << 19, 1 << 22)  # bytes of the messages that measure the bandwidth
TRIES = 3  # messages of each size
LONG = 0.005  # seconds; if a message takes longer, no larger one is sent
LEAST = 2e-5  # seconds; smaller differences between round trips are noise


def measure(ask: Callable[[int], float]) -> tuple[float, float]:
    """Returns (latency in one direction in seconds, bandwidth in bytes per second).

    ask: number of bytes -> seconds from the start of sending them until a small answer has arrived"""
    begun = time.perf_counter()
    trips: list[float] = []
    while len(trips) < LEAST_ROUNDS or (len(trips) < ROUNDS and time.perf_counter() - begun < ROUND_SECONDS):
        trips.append(ask(0))
    trip = min(trips)
    bandwidth = 0.0
    for size in SIZES:
        seconds = min(ask(size) for _ in range(TRIES))
        bandwidth = max(bandwidth, size / max(seconds - trip, LEAST))  # the best, because a busy machine only lowers it
        if seconds > LONG:
            break
    return trip / 2, bandwidth
