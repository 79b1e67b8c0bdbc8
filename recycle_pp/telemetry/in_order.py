"""Calls in a fixed order, although one of them may become ready after those behind it.

order = InOrder()
order(write, record)                    # runs now, or after the open calls before it
place = order.reserve(write, death)     # an open call: it and all later ones wait
order.settle(place)                     # it is ready; runs all calls up to the next open one
order.release()                         # all are ready
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any


@dataclass(eq=False)
class Place:
    """A call in the order."""

    call: Callable[[], object]
    open: bool  # it is not ready


class InOrder:
    """For one thread. An exception of a call reaches the caller of the method that runs it; later calls stay."""

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
