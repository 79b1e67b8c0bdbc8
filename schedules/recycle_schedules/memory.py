"""A worker's memory in bytes, and the number of micro-batches in flight that fit.

    stage = StageMemory(weights=8e9, state=24e9, sums=16e9, flight=1e9, ...)
    stage.peak(peers=3, ran=6, in_flight=4)      # {"weights": ..., ...} in the phase with the highest use
    stage.in_flight(80e9, peers=3, ran=6)        # number of micro-batches that fit
    Memory.of({"capacity": 80e9, "stages": [...]}, stages=4).limit(worker, mode, peers=3, ran=6)
    fastest(modes(kept, recomputed, "mixed"), 80e9, peers=3, ran=6, enough=4)     # the fastest mode that fits

A step has four phases: micro-batches are in flight, the gradient sums are reduced over the peers, the optimizer steps,
and a checkpoint is copied. The peak is the memory of the phase that needs most. After a death each peer runs more
micro-batches and keeps their boundary tensors. It also holds a larger share of a sharded optimizer state. So it has
less room for micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from .ops import Worker


@dataclass(frozen=True)
class StageMemory:
    """Memory of a worker of one stage. All fields are in bytes, except the counts `copies`, `adjacent` and `pipelines`
    and the flag `staggered`.

    weights     the weights used in computation, and autocast's rounded copies of them
    state       one copy of the optimizer state for all of the stage's parameters: moments, undo copies, and master
                weights if they differ from the weights
    copies      number of workers that hold each block of the state and of its gradient; 0: every worker holds all
    sums        accumulators of the gradient
    gradient    the reduced gradient in float32, from the reduction to the commit
    staggered   whether micro-batches of the next step may be in flight before the commit
    boundary    tensors of one micro-batch that the replay log keeps until the commit
    flight      one micro-batch between its F and its I
    waiting     one micro-batch between its I and its W
    op          largest temporary memory of one op
    whole_op    value of `op` if every backward is a B, so that no micro-batch waits for its W
    payload     send buffer of the reduction: a copy of the sums, or one bucket of it
    received    contributions of all workers of the stage to one worker's part of the sums
    restored    the reduced sums converted to float32, 0 if they already are float32
    update      largest temporary memory of the optimizer step
    arriving    new weights of all blocks of the stage. Before the commit, a worker receives the blocks that it does not
                hold, and keeps them besides the weights in use
    saved       copies from which a checkpoint and its digests are written
    communicator  buffers of one NCCL communicator; 0 without NCCL
    adjacent    number of adjacent stages
    pipelines   number of pipelines of the job
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
    communicator: float = 0.0
    adjacent: int = 0
    pipelines: int = 0

    def each(self, whole: bool = False) -> float:
        """Maximum bytes that one micro-batch in flight takes. whole: whether every backward is a B."""
        return self.flight if whole else max(self.flight, self.waiting)

    def share(self, peers: int) -> float:
        """The share of the state and of the reduced gradient that a worker holds. peers: live workers of the stage."""
        return min(1.0, self.copies / peers) if self.copies else 1.0

    def always(self, peers: int, ran: int) -> dict[str, float]:
        """Permanent memory in bytes, by purpose. ran: micro-batches that the worker runs in a step."""
        parts = {
            "weights": self.weights,
            "optimizer state": self.state * self.share(peers),
            "sums": self.sums,
            "replay log": self.boundary * ran,
        }
        return parts | ({"communicators": self.communicator * self.groups(peers)} if self.communicator else {})

    def groups(self, peers: int) -> int:
        """Number of NCCL communicators of a worker. If there are several pipelines, there is one for its stage. For
        each adjacent stage there is one to that stage's worker in its own pipeline, and one to that stage's worker in
        each pipeline whose worker of this stage is dead."""
        return (self.pipelines > 1) + self.adjacent * (1 + self.pipelines - peers)

    def moments(self, peers: int, in_flight: float, whole: bool = False) -> dict[str, dict[str, float]]:
        """Additional memory in each phase of a step: {phase: {purpose: bytes}}."""
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
        """Memory in the phase that needs most, in bytes, by purpose."""
        moments = self.moments(peers, in_flight, whole).values()
        return self.always(peers, ran) | max(moments, key=lambda parts: sum(parts.values()))

    def outside_compute(self, peers: int) -> float:
        """The largest additional memory of any phase without micro-batches in flight."""
        return max(sum(parts.values()) for name, parts in self.moments(peers, 0).items() if name != "compute")

    def in_flight(self, capacity: float, peers: int, ran: int, whole: bool = False) -> float:
        """Number of micro-batches in flight that fit into `capacity` bytes. 0 if all other memory alone does not fit,
        inf if a micro-batch takes no memory."""
        room = capacity - sum(self.always(peers, ran).values())
        room_for_flight = room - sum(self.moments(peers, 0, whole)["compute"].values())
        if min(room_for_flight, room - self.outside_compute(peers)) < 0:
            return 0
        each = self.each(whole)
        return math.floor(room_for_flight / each) if each else math.inf


@dataclass(frozen=True)
class Mode:
    """An execution mode of a stage.

    memory     memory of the stage in this mode
    recompute  whether the backward recomputes the layers
    whole      whether every backward is a B"""

    memory: StageMemory
    recompute: bool
    whole: bool


def modes(kept: StageMemory, recomputed: StageMemory | None, backward: str) -> list[Mode]:
    """The available modes, fastest first.

    recomputed: the stage's memory with recomputation, None if recomputation is not an option. Recomputation costs an
    extra F. It saves little memory if backwards are split, because a micro-batch takes about as much memory before its
    W as after its F."""
    found = [] if backward == "coupled" else [Mode(kept, False, False)]
    if recomputed is None:
        return found or [Mode(kept, False, True)]
    if backward == "decoupled":
        return [*found, Mode(recomputed, True, False)]
    return [*found, Mode(kept, False, True), Mode(recomputed, True, True)]


def fastest(among: Sequence[Mode], capacity: float, peers: int, ran: int, enough: float) -> Mode:
    """The first mode in which `enough` micro-batches fit. If there is none, the mode in which the largest number fits,
    the first of equals. If not even one fits in any mode, the mode with the smallest peak for one micro-batch."""
    fitting = [mode.memory.in_flight(capacity, peers, ran, mode.whole) for mode in among]
    if not any(fitting):
        return min(among, key=lambda mode: sum(mode.memory.peak(peers, ran, 1, mode.whole).values()))
    wanted = min(enough, max(fitting))
    return next(mode for mode, n in zip(among, fitting, strict=True) if n >= wanted)


@dataclass(frozen=True)
class Memory:
    """The problem's key `memory`.

    stages      memory of every stage
    recomputed  memory of every stage if it recomputes its layers. If given, each stage runs in the fastest mode with
                room for P - s micro-batches, the number in flight with 1F1B (`fastest`)
    default     capacity in bytes of workers without an entry in `capacity`, None for no limit
    capacity    capacity in bytes, by worker
    least       0 or 1: number of micro-batches in flight that is allowed even if it does not fit"""

    stages: tuple[StageMemory, ...]
    recomputed: tuple[StageMemory, ...] | None
    default: float | None
    capacity: Mapping[Worker, float]
    least: int

    @classmethod
    def of(cls, given: Any, stages: int) -> Memory:
        """Parse the value of the key `memory`. Raises ValueError if it is invalid; the message starts with the key."""
        if not isinstance(given, Mapping) or not {"capacity", "stages"} <= set(given):
            raise ValueError(f"memory: expected an object with the keys capacity and stages, not {given!r}")
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
        """Whether all workers have the same capacity."""
        return not self.capacity

    def mode(self, stage: int, backward: str, workers: Sequence[Worker], ran: int) -> Mode:
        """The execution mode of a stage, chosen for the smallest capacity among its live workers.

        backward: the problem's key. workers: the live workers. ran: micro-batches that each of them runs in a step."""
        recomputed = None if self.recomputed is None else self.recomputed[stage]
        among = modes(self.stages[stage], recomputed, backward)
        sizes = [size for w in workers if (size := self.capacity.get(w, self.default)) is not None]
        enough = min(len(self.stages) - stage, ran)
        return fastest(among, min(sizes), max(1, len(workers)), ran, enough) if sizes and recomputed else among[0]

    def limit(self, worker: Worker, mode: Mode, peers: int, ran: int) -> float:
        """Maximum number of micro-batches in flight on a worker, inf for no limit. peers, ran: as for `StageMemory`."""
        capacity = self.capacity.get(worker, self.default)
        if capacity is None:
            return math.inf
        return max(self.least, mode.memory.in_flight(capacity, peers, ran, mode.whole))

    def room(self, worker: Worker, mode: Mode, peers: int, ran: int, in_flight: float) -> float:
        """Bytes that stay free on a worker with that many micro-batches in flight. Negative if they do not fit."""
        capacity = self.capacity.get(worker, self.default)
        if capacity is None:
            return math.inf
        return capacity - sum(mode.memory.peak(peers, ran, in_flight, mode.whole).values())


def _stages(key: str, given: Any, stages: int) -> tuple[StageMemory, ...]:
    if not isinstance(given, (list, tuple)) or len(given) != stages:
        raise ValueError(f"memory.{key}: expected {stages} objects, one per stage")
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


__all__ = ["Memory", "Mode", "StageMemory", "fastest", "modes"]
