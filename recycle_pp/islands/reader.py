"""Reads the deltas and snapshots of a worker's units from the store.

    reader = Reader(store, view, closings, layout, bits=8)
    unit = reader.unit(UnitId(3, 0), digest)        # a `theta.Unit`; read units in ascending order
    reader.received                                 # bytes that were read

Even deltas of this island are read from the store, where they could differ, because all islands must use the same
values. An object that was deleted after the listing raises Absent, not Damaged, because a new listing will not have it.

An object contains several units, so the newest object of each island is kept until a unit of another object is read.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from recycle_pp.numerics.layout import Layout
from recycle_pp.storage.store import Store
from recycle_pp.wire.messages.units import UnitId

from .codec import Damaged, Floats, content_bytes, opened
from .objects import Part, View, holding
from .rounds import Closings
from .theta import Outer


class Reader:
    def __init__(
        self,
        store: Store,
        view: View,
        closings: Closings,
        layout: Layout,
        bits: int,
        received: Callable[[], None] = lambda: None,
    ) -> None:
        """received: called after every object that was read"""
        self._closings, self._on_received = closings, received
        self._store, self._view, self._layout, self._bits = store, view, layout, bits
        self._newest: dict[tuple[int, str], tuple[str, bytes]] = {}
        self.received = 0

    def unit(self, unit: UnitId, digest: bytes) -> _OneUnit:
        """digest: see `codec.seal`"""
        return _OneUnit(self, unit, digest)

    def delta(self, unit: UnitId, digest: bytes, number: int, island: str) -> Floats:
        """Reads a damaged object again, because all islands must find the same damage."""
        try:
            return self._delta(unit, digest, number, island)
        except Damaged:
            self._newest.pop((number, island), None)
            return self._delta(unit, digest, number, island)

    def _delta(self, unit: UnitId, digest: bytes, number: int, island: str) -> Floats:
        size = self._layout.unit_sizes[self._layout.number(unit)]
        delivery = self._view.delivery(number, island, self._closings[number][island])
        assert delivery is not None  # the round is complete in the listing
        part = holding(delivery.parts, unit.layer, unit.number)
        if part is None:
            raise Damaged(f"round {number} of island {island} has no unit {unit.number} of layer {unit.layer}")
        content = self._content((number, island), part)
        bits = self._bits
        start = self._bytes(Part(part.path, part.layer, part.first, unit.number - 1))
        try:
            return opened(content[start : start + content_bytes(size, bits)], digest, size)
        except Damaged as damaged:
            raise Damaged(f"{part.path}: {damaged}") from None

    def snapshot(self, unit: UnitId, rounds: int) -> Outer:
        part = holding(self._view.snapshots[rounds], unit.layer, unit.number)
        assert part is not None  # the snapshot is complete
        content = self._content((rounds, ""), part)
        sizes = self._layout.unit_sizes
        of = [sizes[self._layout.number(UnitId(part.layer, n))] for n in part.units()]
        start, size = 2 * sum(of[: unit.number - part.first]), of[unit.number - part.first]
        both = np.frombuffer(content, "<f4").astype(np.float32)
        if both.size != 2 * sum(of):
            raise Damaged(f"{part.path} has {len(content)} bytes, expected {8 * sum(of)}")
        return Outer(both[start : start + size], both[start + size : start + 2 * size])

    def _content(self, key: tuple[int, str], part: Part) -> bytes:
        path, content = self._newest.get(key, ("", b""))
        if path != part.path:
            content = self._store.get(part.path)
            self.received += len(content)
            self._on_received()
            self._newest[key] = part.path, content
        return content

    def _bytes(self, part: Part) -> int:
        """Number of bytes of an object with these units."""
        sizes = self._layout.unit_sizes
        numbers = [self._layout.number(UnitId(part.layer, n)) for n in part.units()]
        return sum(content_bytes(sizes[number], self._bits) for number in numbers)


class _OneUnit:
    def __init__(self, reader: Reader, unit: UnitId, digest: bytes) -> None:
        self._reader, self._unit, self._digest = reader, unit, digest

    def delta(self, number: int, island: str) -> Floats:
        return self._reader.delta(self._unit, self._digest, number, island)

    def snapshot(self, rounds: int) -> Outer:
        return self._reader.snapshot(self._unit, rounds)
