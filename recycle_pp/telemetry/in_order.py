"""Runs calls in a fixed order, even if one of them becomes ready after later ones.

order = InOrder()
order(write, record)                    # runs now, or after earlier open calls
place = order.reserve(write, death)     # an open call: it and all later ones wait
order.settle(place)                     # marks it ready, and runs all calls up to the next open one
order.release()                         # marks all calls ready and runs them
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any


@dataclass(eq=False)
class Place:
    """A call in the queue."""

    call: Callable[[], object]
    open: bool  # whether the call is not ready to run yet


class InOrder:
    """A queue of calls, which run in the order of the queue. Not thread-safe. If a call fails, the method that ran it
    raises the exception, and later calls stay queued."""

    def __init__(self) -> None:
        self._places: deque[Place] = deque()

    def __call__(self, function: Callable[..., object], *arguments: Any) -> None:
        self._places.append(Place(partial(function, *arguments), open=False))
        self._run()

    def reserve(self, function: Callable[..., object], *arguments: Any) -> Place:
        place = Place(partial(function, *arguments), open=True)
        self._places.append(place)
        return place

    def settle(self, place: Place) -> None:
        place.open = False
        self._run()

    def release(self) -> None:
        for place in self._places:
            place.open = False
        self._run()

    def _run(self) -> None:
        while self._places and not self._places[0].open:
            self._places.popleft().call()
