"""What a worker of a stage holds, in bytes: one definition for the start, the planner and `plan --memory`.

    memory = stage_memory(settings, stage=0, device="cpu")  # of the project's own Transformer
    memory.peak(peers=3, ran=6, in_flight=4)                # {"weights": ..., ...} at the fullest moment of a step
    memory.in_flight(80e9, peers=3, ran=6)                  # how many micro-batches fit

Everything follows from shapes. Tests count the tensors of real stages against it, `bench/memory.py` whole jobs. Tensors
are all it knows: what Python and torch take for themselves comes on top (`PROCESS`).

A step has four moments, and the fullest counts: micro-batches are in flight; the sums are reduced over the peers; the
optimizer steps; a checkpoint is copied (on a CPU; the copies of a GPU lie on its host).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from recycle_pp.config.settings import Model, Settings

from .split import layers_of

PROCESS = 280_000_000  # bytes of a worker on a CPU before it holds anything: Python and torch
FLOAT, HALF, LONG = 4, 2, 8
GAP = 128  # elements that a tensor's place in the stage's vector is a multiple of (numerics.layout)
CHUNK = 512 << 20  # of logits: what the fused head makes of them at a time (recycle_kernels.head_loss)


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
    payload     what is reduced: a copy of the sums, or a bucket of it
    received    what comes in from each peer for its part of the sums, in all
    restored    the float32 that the reduced sums are turned into, where they are not float32
    update      most that the optimizer's step takes
    saved       the copies that a checkpoint is written of, and its digests are made of
    """

    weights: float
    state: float
    copies: int
    sums: float
    gradient: float
    staggered: bool
    boundary: float
    flight: float
    waiting: float
    op: float
    payload: float
    received: float
    restored: float
    update: float
    saved: float

    @property
    def each(self) -> float:
        """Of one micro-batch in flight, at most."""
        return max(self.flight, self.waiting)

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

    def moments(self, peers: int, in_flight: float) -> dict[str, dict[str, float]]:
        """What comes to it at each moment of a step."""
        gradient = {"reduced gradient": self.gradient * self.share(peers)}
        inboxes = self.received * (peers - 1) / peers
        return {
            "compute": {"activations": in_flight * self.each + self.op} | (gradient if self.staggered else {}),
            "reduce": {"reduction": self.payload + max(inboxes, self.restored * self.share(peers))},
            "update": gradient | {"update": self.update},
            "save": gradient | {"checkpoint": self.saved},
        }

    def peak(self, peers: int, ran: int, in_flight: float) -> dict[str, float]:
        """By part, at the fullest moment."""
        moments = self.moments(peers, in_flight).values()
        return self.always(peers, ran) | max(moments, key=lambda parts: sum(parts.values()))

    def aside(self, peers: int) -> float:
        """Most that comes to `always` while nothing is in flight."""
        return max(sum(parts.values()) for name, parts in self.moments(peers, 0).items() if name != "compute")

    def in_flight(self, capacity: float, peers: int, ran: int) -> float:
        """How many micro-batches fit into so many bytes; 0 where the rest alone does not, inf where they take none."""
        room = capacity - sum(self.always(peers, ran).values())
        room_for_flight = room - sum(self.moments(peers, 0)["compute"].values())
        if min(room_for_flight, room - self.aside(peers)) < 0:
            return 0
        return math.floor(room_for_flight / self.each) if self.each else math.inf


def stage_memory(
    settings: Settings,
    stage: int,
    *,
    device: str = "cpu",
    recompute: bool | None = None,
    waits: bool = True,
) -> StageMemory:
    """Of a worker of that stage of the project's own Transformer. device: cpu or cuda.
    recompute: instead of what `model.recompute` says. waits: whether I and W may be apart (else every backward is a B).
    """
    model, numerics, parallel = settings.model, settings.numerics, settings.parallel
    layers = layers_of_stages(settings)[stage]
    sizes = list(tensor_sizes(model, layers))
    count, largest = sum(sizes), max(sizes)
    rounded, cast = numerics.precision == "bf16", numerics.precision == "bf16-autocast"
    matrices = sum(linear_sizes(model, layers)) if cast else 0
    exact = numerics.reproducible
    each_sum = LONG if exact and numerics.sums == "int64" else FLOAT
    state = (2 + rounded) * FLOAT + 3 * FLOAT * settings.optimizer.stagger
    tokens = parallel.microbatch_size * model.sequence
    again = model.recompute if recompute is None else recompute
    fused = model.kernels == "triton" or (model.kernels == "auto" and device == "cuda")
    activations = Activations(model, layers, tokens, numerics.precision, fused, again, waits)
    sides = (stage > 0) + (stage < parallel.stages - 1)
    product = max(linear_sizes(model, layers)) * (HALF if rounded or cast else FLOAT) if exact or rounded or cast else 0
    return StageMemory(
        weights=(HALF if rounded else FLOAT) * count + HALF * matrices,
        state=state * count,
        copies=parallel.copies,
        sums=each_sum * count,
        gradient=FLOAT * count,
        staggered=settings.optimizer.stagger,
        boundary=activations.stream * tokens * model.width * sides,
        flight=activations.flight,
        waiting=activations.waiting,
        op=max(activations.op, 0 if fused else product),
        payload=each_sum * count,
        received=each_sum * count if device == "cpu" else 0,
        restored=FLOAT * count if exact else 0,
        update=0 if fused or settings.optimizer.clip is None else FLOAT * largest,
        saved=(FLOAT + 3 * FLOAT) * count if device == "cpu" else 0,
    )


def layers_of_stages(settings: Settings) -> list[range]:
    """The layers of each stage of the project's own Transformer."""
    assert isinstance(settings.model.layers, int)
    return layers_of(settings.model.layers, settings.parallel.stages, settings.model.split)


def parameters(model: Model, layers: range) -> int:
    """The number of parameters of a stage with these layers."""
    return sum(_tensors(model, layers))


def tensor_sizes(model: Model, layers: range) -> Iterator[int]:
    """Elements of each tensor of the stage's vector, with the gap behind it."""
    return (-(-size // GAP) * GAP for size in _tensors(model, layers))


def linear_sizes(model: Model, layers: range) -> list[int]:
    """Elements of each matrix that activations are multiplied with."""
    width, q, kv = model.width, model.heads * model.head_size, model.kv_heads * model.head_size
    each = [width * (q + 2 * kv), q * width, 2 * model.ffn * width, model.ffn * width]
    return each * len(layers) + [model.vocabulary * width] * (layers.stop == model.layers)


def _tensors(model: Model, layers: range) -> list[int]:
    """Elements of each parameter of a stage with these layers."""
    width, q, kv = model.width, model.heads * model.head_size, model.kv_heads * model.head_size
    inside = linear_sizes(model, range(len(layers)))[: 4 * len(layers)] + [width] * 2 * len(layers)
    inside += [q + 2 * kv] * (model.qkv_bias * len(layers)) + [model.head_size] * (model.qk_norm * 2 * len(layers))
    first, last = layers.start == 0, layers.stop == model.layers
    table = model.vocabulary * width
    tied_here = model.tied and first and last  # the head is the embedding, which is here
    return inside + [table] * first + [table] * (last and not tied_here) + [width] * last


class Activations:
    """What the stage keeps of one micro-batch of `tokens` tokens: `flight` from F to I, `waiting` from I to W, and `op`
    beside that in the middle of an op; bytes. stream: of an element of the residual stream."""

    def __init__(
        self, model: Model, layers: range, tokens: int, precision: str, fused: bool, recompute: bool, waits: bool
    ):
        stream = self.stream = HALF if precision == "bf16" else FLOAT
        product = FLOAT if precision == "fp32" else HALF  # of an element that is multiplied with a matrix
        width, ffn = model.width, model.ffn
        q, kv = model.heads * model.head_size, model.kv_heads * model.head_size

        # Of a layer and a token: what F keeps, what I leaves for W (both operands of each product), what I takes.
        kept = width * (2 * stream + 2 * product) + product * (3 * q + 3 * kv + 3 * ffn) + FLOAT * (model.heads + 2)
        if model.qk_norm:
            kept += product * (q + kv) + FLOAT * (model.heads + model.kv_heads)
        if model.dropout:
            kept += 2 * product * width
        queue = waits * (product * (4 * width + 2 * q + 2 * kv + 3 * ffn) + stream * width * recompute)
        inner = 4 * product * ffn + stream * width  # in the middle of SwiGLU's backward
        if recompute:  # its last layer is there as a whole while what the others leave is
            flight, inner = stream * width, inner + max(0, kept - queue)
        else:
            flight = kept

        # Of a token: embedding and head.
        first, last, table = layers.start == 0, layers.stop == model.layers, FLOAT * model.vocabulary
        flight_ends, waiting_ends, head = 0, 0, 0
        if first:  # the tokens; and the gradient of what they became
            flight_ends, waiting_ends = LONG, waits * (LONG + stream * width)
        if last and fused:  # x, dx, the log-sums and targets; W projects once more
            flight_ends += width * (stream + 2 * product) + FLOAT + LONG
            waiting_ends += waits * (product * width + FLOAT + LONG)
        elif last:  # x and the logarithms of what softmax gives; in I the gradients of both
            flight_ends += width * (stream + product) + table + FLOAT + LONG
            waiting_ends += waits * product * (width + model.vocabulary)
            head = 2 * table

        self.flight = tokens * (len(layers) * flight + flight_ends)
        self.waiting = tokens * (len(layers) * queue + waiting_ends)
        chunk = min(CHUNK, product * model.vocabulary * tokens) if last and fused else 0
        self.op = max(tokens * max(inner, head), chunk)


__all__ = ["PROCESS", "Activations", "StageMemory", "layers_of_stages", "parameters", "stage_memory"]
