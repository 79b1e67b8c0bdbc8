"""What a worker holds, in bytes: how many micro-batches it may have in flight follows from it.

    stage = StageMemory(weights=8e9, state=24e9, sums=16e9, flight=1e9, ...)
    stage.peak(peers=3, ran=6, in_flight=4)      # {"weights": ..., ...} at the fullest moment of a step
    stage.in_flight(80e9, peers=3, ran=6)        # how many micro-batches fit
    Memory.of({"capacity": 80e9, "stages": [...]}, stages=4).limit(worker, way, peers=3, ran=6)
    fastest(ways(kept, recomputed, "mixed"), 80e9, peers=3, ran=6, enough=4)     # Way: how the stage gets on with it

A step has four moments, and the fullest counts: micro-batches are in flight; the sums are reduced over the peers; the
optimizer steps; a checkpoint is copied. With fewer peers a worker runs more micro-batches, whose boundary tensors it
keeps, and holds a larger share of an optimizer state that is sharded: a death leaves less room for micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from .ops import Worker


@dataclass(frozen=True)
class StageMemory:
    """Bytes of a worker.

    weights     what is computed with, and autocast's rounded copies of it
    state       masters where they are not the weights, moments, undo copies: of all the stage's parameters, once
    copies      how many workers hold each block of the state, and its gradient; 0: everybody all of it
    sums        the accumulators of the gradient
    gradient    the reduced gradient in float32, from the reduction to the commit
    staggered   whether micro-batches of the next step may be in flight before the commit
    boundary    what one micro-batch leaves in the replay log, until the commit
    flight      of one micro-batch from its F to its I
    waiting     of one micro-batch from its I to its W
    op          most that one op takes beside that, until it ends
    whole_op    the same where every backward is a B, and nothing waits
    payload     what is reduced: a copy of the sums, or a bucket of it
    received    what comes in from each peer for its part of the sums, in all
    restored    the float32 that the reduced sums are turned into, where they are not float32
    update      most that the optimizer's step takes
    arriving    weights that come before the commit, beside those in use: all the stage's; a worker takes others' blocks
    saved       the copies that a checkpoint is written of, and its digests are made of
    """

    weights: float = 0.0
    state: float = 0.0
    copies: int = 0
    sums: float = 0.0
    gradient: float = 0.0
    staggered: bool = False
    boundary: float = 0.0
    flight: float = 0.0
    waiting: float = 0.0
    op: float = 0.0
    whole_op: float = 0.0
    payload: float = 0.0
    received: float = 0.0
    restored: float = 0.0
    update: float = 0.0
    arriving: float = 0.0
    saved: float = 0.0

    def each(self, whole: bool = False) -> float:
        """Of one micro-batch in flight, at most. whole: every backward is a B."""
        return self.flight if whole else max(self.flight, self.waiting)

    def share(self, peers: int) -> float:
        """Of the state and of the reduced gradient, what one of so many live workers of the stage holds."""
        return min(1.0, self.copies / peers) if self.copies else 1.0

    def always(self, peers: int, ran: int) -> dict[str, float]:
        """What is there at every moment. ran: micro-batches that the worker runs in a step."""
        return {
            "weights": self.weights,
            "optimizer state": self.state * self.share(peers),
            "sums": self.sums,
            "replay log": self.boundary * ran,
        }

    def moments(self, peers: int, in_flight: float, whole: bool = False) -> dict[str, dict[str, float]]:
        """What comes to it at each moment of a step."""
        activations = in_flight * self.each(whole) + (self.whole_op if whole else self.op)
        gradient = {"reduced gradient": self.gradient * self.share(peers)}
        inboxes = self.received * (peers - 1) / peers
        return {
            "compute": {"activations": activations} | (gradient if self.staggered else {}),
            "reduce": {"reduction": self.payload + max(inboxes, self.restored * self.share(peers))},
            "update": gradient | {"update": max(self.update, self.arriving * (1 - self.share(peers)))},
            "save": gradient | {"checkpoint": self.saved},
        }

    def peak(self, peers: int, ran: int, in_flight: float, whole: bool = False) -> dict[str, float]:
        """By part, at the fullest moment."""
        moments = self.moments(peers, in_flight, whole).values()
        return self.always(peers, ran) | max(moments, key=lambda parts: sum(parts.values()))

    def aside(self, peers: int) -> float:
        """Most that comes to `always` while nothing is in flight."""
        return max(sum(parts.values()) for name, parts in self.moments(peers, 0).items() if name != "compute")

    def in_flight(self, capacity: float, peers: int, ran: int, whole: bool = False) -> float:
        """How many micro-batches fit into so many bytes; 0 where the rest alone does not, inf where they take none."""
        room = capacity - sum(self.always(peers, ran).values())
        room_for_flight = room - sum(self.moments(peers, 0, whole)["compute"].values())
        if min(room_for_flight, room - self.aside(peers)) < 0:
            return 0
        each = self.each(whole)
        return math.floor(room_for_flight / each) if each else math.inf


@dataclass(frozen=True)
class Way:
    """How a stage runs its micro-batches. memory: what it then holds; recompute: its layers run again in the backward;
    whole: every backward is a B."""

    memory: StageMemory
    recompute: bool
    whole: bool


def ways(kept: StageMemory, recomputed: StageMemory | None, backward: str) -> list[Way]:
    """The ways that there are, the fastest first. Recomputing takes one F more; what waits between I and W is about as
    large as what F keeps, so it gains little where backwards are split. recomputed: None: it is not for choice."""
    found = [] if backward == "coupled" else [Way(kept, False, False)]
    if recomputed is None:
        return found or [Way(kept, False, True)]
    if backward == "decoupled":
        return [*found, Way(recomputed, True, False)]
    return [*found, Way(kept, False, True), Way(recomputed, True, True)]


def fastest(among: Sequence[Way], capacity: float, peers: int, ran: int, enough: float) -> Way:
    """The first with which `enough` micro-batches fit in flight, else the first with which most do; where none does,
    that in which a micro-batch takes least."""
    fitting = [way.memory.in_flight(capacity, peers, ran, way.whole) for way in among]
    if not any(fitting):
        return min(among, key=lambda way: sum(way.memory.peak(peers, ran, 1, way.whole).values()))
    wanted = min(enough, max(fitting))
    return next(way for way, n in zip(among, fitting, strict=True) if n >= wanted)


@dataclass(frozen=True)
class Memory:
    """The problem's key `memory`. capacity: of every worker, or by worker with a default. least: micro-batches that are
    tried in any case. recomputed: the stages once more, each as it is if it recomputes its layers: then each of them
    chooses its way (`fastest`), with 1F1B's P - s micro-batches for enough."""

    stages: tuple[StageMemory, ...]
    recomputed: tuple[StageMemory, ...] | None
    default: float | None
    capacity: Mapping[Worker, float]
    least: int

    @classmethod
    def of(cls, given: Any, stages: int) -> Memory:
        """ValueError with one sentence that begins with the key."""
        if not isinstance(given, Mapping) or not {"capacity", "stages"} <= set(given):
            raise ValueError(f"memory: an object with the keys capacity and stages is needed, not {given!r}")
        if unknown := sorted(str(key) for key in set(given) - {"capacity", "stages", "recomputed", "least"}):
            raise ValueError(f"memory: unknown key {unknown[0]!r}; known are capacity, stages, recomputed, least")
        capacity, least = given["capacity"], given.get("least", 0)
        if least not in (0, 1) or isinstance(least, bool):
            raise ValueError(f"memory.least: {least!r} is neither 0 nor 1")
        per_worker = capacity if isinstance(capacity, Mapping) else {"default": capacity}
        sizes = {key: _size(f"memory.capacity.{key}", size) for key, size in per_worker.items() if size is not None}
        try:
            default = sizes.pop("default", None)
            by_worker = {Worker.parse(key): size for key, size in sizes.items()}
        except ValueError as error:
            raise ValueError(f"memory.capacity: {error}") from None
        again = given.get("recomputed")
        kept = _stages("stages", given["stages"], stages)
        return cls(kept, None if again is None else _stages("recomputed", again, stages), default, by_worker, least)

    @property
    def alike(self) -> bool:
        """Has every worker as much?"""
        return not self.capacity

    def way(self, stage: int, backward: str, workers: Sequence[Worker], ran: int) -> Way:
        """How the stage runs its micro-batches with these live workers: that of all of them who has least decides."""
        recomputed = None if self.recomputed is None else self.recomputed[stage]
        among = ways(self.stages[stage], recomputed, backward)
        sizes = [size for w in workers if (size := self.capacity.get(w, self.default)) is not None]
        enough = min(len(self.stages) - stage, ran)
        return fastest(among, min(sizes), max(1, len(workers)), ran, enough) if sizes and recomputed else among[0]

    def limit(self, worker: Worker, way: Way, peers: int, ran: int) -> float:
        """Most micro-batches in flight on a worker; peers, ran: as for `StageMemory`."""
        capacity = self.capacity.get(worker, self.default)
        if capacity is None:
            return math.inf
        return max(self.least, way.memory.in_flight(capacity, peers, ran, way.whole))


def _stages(key: str, given: Any, stages: int) -> tuple[StageMemory, ...]:
    if not isinstance(given, (list, tuple)) or len(given) != stages:
        raise ValueError(f"memory.{key}: {stages} objects are needed, one per stage")
    return tuple(_stage(k, one) for k, one in enumerate(given))


def _stage(stage: int, given: Any) -> StageMemory:
    if isinstance(given, StageMemory):
        return given
    known = [f.name for f in fields(StageMemory)]
    if not isinstance(given, Mapping) or (unknown := sorted(str(key) for key in given if key not in known)):
        what = repr(unknown[0]) if isinstance(given, Mapping) else repr(given)
        raise ValueError(f"memory.stages: {what} of stage {stage} is not one of {', '.join(known)}")
    for key, value in given.items():
        if key != "staggered":
            _size(f"memory.stages.{key}", value)
    return StageMemory(**given)


def _size(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{name}: {value!r} is not a number of bytes")
    return value


__all__ = ["Memory", "StageMemory", "Way", "fastest", "ways"]
