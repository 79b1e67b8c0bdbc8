"""Computes the memory of a stage's worker in bytes, for the job's start, the planner and `plan --memory`.

    memory = stage_memory(settings, stage=0, device="cpu")  # of the project's own Transformer
    memory.peak(peers=3, ran=6, in_flight=4)                # {"weights": ..., ...} when a step needs the most memory
    memory.in_flight(80e9, peers=3, ran=6)                  # number of micro-batches that fit

All sizes follow from shapes, except those of NCCL's communicators. Tests compare them with the tensors of real stages,
and `bench/memory.py` with whole jobs. `PROCESS` is the memory of Python and torch themselves. The copies for writing a
checkpoint are on the host, so they count only if the device is a CPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from recycle_schedules import StageMemory

from recycle_pp.config.settings import Model, Settings
from recycle_pp.numerics.outer_state import WIDTH, outer_vectors
from recycle_pp.numerics.update_rules.choice import planned
from recycle_pp.numerics.update_rules.rule import UpdateRule

from .split import layers_of

PROCESS = 310_000_000  # bytes of an empty worker on a CPU: Python and the used parts of torch
FLOAT, HALF, LONG = 4, 2, 8
GAP = 128  # tensors start at multiples of this many elements in the stage's vector (numerics.layout)
BUCKET = 1 << 20  # with sharded state, peers sum runs of units with up to this many elements (state.runs)
PIECE = 1 << 18  # elements received from each peer at a time; the next piece may arrive early (state.passing, over TCP)
BLOCK = 1 << 16  # elements of bf16 moments that a CPU converts to float32 at a time (numerics.torch_operations)
TOGETHER = 4  # buckets that all peers sum at a time (over NCCL or Gloo)
COMMUNICATOR = 200_000_000  # estimated bytes of an NCCL communicator; reports range from 100 to 500 MB
SAME_INPUT = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}  # matrix -> a matrix with the same input
CHUNK = 512 << 20  # bytes of logits that the fused head computes at a time (recycle_kernels.head_loss)


def stage_memory(
    settings: Settings,
    stage: int,
    *,
    device: str = "cpu",
    recompute: bool | None = None,
) -> StageMemory:
    """Memory of a worker of stage `stage` of the project's own Transformer.

    device     cpu or cuda
    recompute  overrides `model.recompute`; None: `model.recompute`, where `auto` counts as false
    """
    model, numerics, parallel = settings.model, settings.numerics, settings.parallel
    layers = layers_of_stages(settings)[stage]
    adapters = _adapters(model) * len(layers)
    held = parameter_memory(settings, *((adapters, []) if adapters else _tensors(model, layers)), device)
    if adapters:
        frozen = (HALF if numerics.precision == "bf16" else FLOAT) * parameters(model, layers)
        held = replace(held, weights=held.weights + frozen)
    rounded, cast = numerics.precision == "bf16", numerics.precision == "bf16-autocast"
    matrices = linear_sizes(model, layers)
    tokens = parallel.microbatch_size * model.sequence
    again = model.recompute is True if recompute is None else recompute
    fused = _fused(model, device)
    masked = settings.data.masked
    activations = Activations(model, layers, tokens, numerics.precision, fused, again, masked)
    operands = tokens * len(layers) * (FLOAT if numerics.precision == "fp32" else HALF) * _operands(model)
    sides = (stage > 0) + (stage < parallel.stages - 1)
    matrix = max(weight_grad_sizes(model, layers)) * (HALF if rounded or cast else FLOAT)
    product = matrix if not fused and (numerics.reproducible or rounded or cast) else 0
    return replace(
        held,
        weights=held.weights + HALF * sum(matrices) * cast,
        boundary=0 if log_elsewhere(settings, device) else activations.stream * tokens * model.width * sides,
        flight=activations.flight,
        waiting=operands if adapters else activations.waiting,
        op=max(activations.op, product),
        whole_op=max(activations.whole_op, product),
        **communicators(settings, stage, device),
    )


def parameter_memory(settings: Settings, matrices: list[int], others: list[int], device: str) -> StageMemory:
    """Memory of a worker for parameters, gradients, optimizer and saving, without micro-batches.

    matrices, others: number of elements of each matrix inside a layer, and of each other parameter."""
    sizes = [[-(-size // GAP) * GAP for size in of] for of in (matrices, others)]
    kinds = [(rule, sum(of), max(of, default=0)) for rule, of in zip(planned(settings.optimizer), sizes, strict=True)]
    outer = WIDTH * len(outer_vectors(settings))
    count, moments = sum(map(sum, sizes)), sum((rule.bytes + outer) * elements for rule, elements, _ in kinds)
    numerics, copies, pipelines = settings.numerics, settings.parallel.copies, settings.parallel.pipelines
    rounded, exact, fused = numerics.precision == "bf16", numerics.reproducible, _fused(settings.model, device)
    each_sum = LONG if exact and numerics.sums == "int64" else FLOAT
    unit = max([BUCKET, *(largest for rule, _, largest in kinds if rule.unit_size is None)])
    bucket = TOGETHER * unit if _together(settings) else unit + 2 * PIECE * (pipelines - 1)
    held = FLOAT * count + moments  # masters and moments
    masters = (min(copies, pipelines) if copies else 1) * FLOAT * count  # copied for the digests
    return StageMemory(
        weights=(HALF if rounded else FLOAT) * count,
        state=moments + rounded * FLOAT * count + held * settings.optimizer.stagger,
        copies=copies,
        sums=each_sum * count,
        gradient=FLOAT * count,
        staggered=settings.optimizer.stagger,
        payload=each_sum * (min(count, bucket) if copies else count),
        received=each_sum * count if device == "cpu" and not copies else 0,
        restored=FLOAT * count if exact or copies else 0,
        update=max(_update(settings, rule, largest, fused) for rule, _, largest in kinds),
        arriving=(HALF if rounded else FLOAT) * count * (settings.optimizer.stagger and copies > 0),
        saved=0 if device != "cpu" else (masters + held) / (pipelines if copies else 1),
    )


def _update(settings: Settings, rule: UpdateRule, largest: int, fused: bool) -> float:
    """Temporary bytes of an update by `rule`.

    largest: number of elements of the largest tensor that `rule` updates
    fused: whether Triton kernels compute the update"""
    scaled = FLOAT * (settings.optimizer.clip is not None)  # clipping scales a copy of the gradient
    if rule.scratch:
        return largest * (rule.scratch + scaled)
    if fused:  # AdamW's kernel needs no temporary memory
        return 0
    return largest * scaled if rule.width == FLOAT else min(largest, BLOCK) * (scaled + FLOAT * len(rule.vectors))


def communicators(settings: Settings, stage: int, device: str) -> dict[str, Any]:
    """The fields of a StageMemory for NCCL's communicators. Empty without NCCL."""
    parallel = settings.parallel
    if parallel.backend != "nccl" or device == "cpu":
        return {}
    adjacent = (stage > 0) + (stage < parallel.stages - 1)
    return {"communicator": COMMUNICATOR, "adjacent": adjacent, "pipelines": parallel.pipelines}


def log_elsewhere(settings: Settings, device: str) -> bool:
    """Whether the replay log is outside of the device's memory."""
    return settings.state.log == "host" and device != "cpu"


def _fused(model: Model, device: str) -> bool:
    return model.kernels == "triton" or (model.kernels == "auto" and device == "cuda")


def _together(settings: Settings) -> bool:
    """Whether a stage's workers exchange units by collectives (sums and broadcasts) instead of messages."""
    return settings.parallel.backend in ("gloo", "nccl")


def sent_bytes(settings: Settings, stage: int) -> float:
    """Bytes that a worker of stage `stage` sends in a step without deaths: boundary tensors and its part of the
    reduction.

    Unsharded: 2 (D-1)/D of the sums, by collectives. Sharded with k copies of each unit, over TCP: (D-1)/D of the sums
    to the first holders, the float32 gradient from a first holder to the k - 1 others, and the new weights to the
    D - k workers without a copy. Sharded, over NCCL or Gloo: gradients and weights are broadcast to all workers, so a
    worker sends (D-1)/D of them on average."""
    p, memory = settings.parallel, stage_memory(settings, stage)
    n, k = p.pipelines, min(p.copies, p.pipelines)
    boundary = memory.boundary * p.microbatches
    if not p.copies:
        return boundary + 2 * (n - 1) / n * memory.sums
    count = memory.gradient / FLOAT
    weights = (HALF if settings.numerics.precision == "bf16" else FLOAT) * count
    if _together(settings):
        return boundary + (n - 1) / n * (memory.sums + (k > 1) * memory.gradient + (k < n) * weights)
    return boundary + (n - 1) / n * memory.sums + (k - 1) / n * memory.gradient + (n - k) / n * weights


def room_for_tensors(capacity: float, device: str) -> float:
    """The part of a worker's memory that is available for tensors, in bytes."""
    return max(0.0, capacity - PROCESS) if device == "cpu" else capacity


def layers_of_stages(settings: Settings) -> list[range]:
    """The layers of each stage of the project's own Transformer."""
    assert isinstance(settings.model.layers, int)
    return layers_of(settings.model.layers, settings.parallel.stages, settings.model.layout)


def parameters(model: Model, layers: range) -> int:
    """The number of parameters of a stage with these layers."""
    return sum(map(sum, _tensors(model, layers)))


def linear_sizes(model: Model, layers: range) -> list[int]:
    """Number of elements of each matrix by which activations are multiplied."""
    width, q, kv = model.width, model.heads * model.head_size, model.kv_heads * model.head_size
    each = [width * (q + 2 * kv), q * width, 2 * model.ffn * width, model.ffn * width]
    return each * len(layers) + [model.vocabulary * width] * (layers.stop == model.layers)


def _tensors(model: Model, layers: range) -> tuple[list[int], list[int]]:
    """Number of elements of each matrix inside a layer, and of each other parameter, of a stage with these layers."""
    width, q, kv = model.width, model.heads * model.head_size, model.kv_heads * model.head_size
    matrices, others = linear_sizes(model, layers)[: 4 * len(layers)], [width] * 2 * len(layers)
    others += [q + 2 * kv] * (model.qkv_bias * len(layers)) + [model.head_size] * (model.qk_norm * 2 * len(layers))
    first, last = layers.start == 0, layers.stop == model.layers
    table = model.vocabulary * width
    tied_here = model.tied and first and last  # a tied head uses the embedding's weights if both are at this stage
    return matrices, others + [table] * first + [table] * (last and not tied_here) + [width] * last


def weight_grad_sizes(model: Model, layers: range) -> list[int]:
    """Number of elements of each matrix whose gradient `W` computes."""
    return _adapters(model) * len(layers) or linear_sizes(model, layers)


def _adapters(model: Model) -> list[int]:
    """Number of elements of each matrix of the adapters in a layer; empty without model.lora."""
    return [model.lora.rank * size for both in _adapted(model).values() for size in both]


def _operands(model: Model) -> int:
    """Number of elements, per token and layer, of the operands that `W` multiplies for the adapters' gradients."""
    sizes = _adapted(model)
    inputs = {SAME_INPUT.get(name, name): size for name, (size, _) in sizes.items()}
    return sum(inputs.values()) + sum(outputs + 2 * model.lora.rank for _, outputs in sizes.values())


def _adapted(model: Model) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of each adapted matrix of a layer, by its name in a Llama."""
    if not model.lora.rank:
        return {}
    width, q, kv, ffn = model.width, model.heads * model.head_size, model.kv_heads * model.head_size, model.ffn
    known = {
        **{"q_proj": (width, q), "k_proj": (width, kv), "v_proj": (width, kv), "o_proj": (q, width)},
        **{"gate_proj": (width, ffn), "up_proj": (width, ffn), "down_proj": (ffn, width)},
    }
    targets = list(known) if model.lora.targets == "all-linear" else model.lora.targets
    if not isinstance(targets, list) or not set(targets) <= known.keys():
        raise ValueError(f"model.lora.targets: memory is known only for all-linear and for {', '.join(known)}")
    return {name: known[name] for name in targets}


class Activations:
    """Memory of a stage for one micro-batch of `tokens` tokens, in bytes.

    flight     kept from F (forward) to I (backward for the input)
    waiting    kept from I to W (backward for the weights)
    op         additional memory within any op
    whole_op   additional memory within F or B, if the backward is not split into I and W
    stream     bytes of an element of the residual stream
    """

    def __init__(
        self, model: Model, layers: range, tokens: int, precision: str, fused: bool, recompute: bool, masked: bool
    ):
        stream = self.stream = HALF if precision == "bf16" else FLOAT
        product = FLOAT if precision == "fp32" else HALF  # bytes of an operand of a matrix product
        width, ffn = model.width, model.ffn
        q, kv = model.heads * model.head_size, model.kv_heads * model.head_size

        # Per layer and token: memory kept by F, memory left by I for W (both operands of each product), temporaries of
        # I.
        kept = width * (2 * stream + 2 * product) + product * (3 * q + 3 * kv + 3 * ffn) + FLOAT * (model.heads + 2)
        if model.qk_norm:
            kept += (1 + (kv < q)) * product * (q + kv) + FLOAT * (model.heads + model.kv_heads)
        if model.dropout:
            kept += 2 * product * width
        kept += masked * product * model.sequence  # attention needs a mask in its own dtype
        queue = product * (4 * width + 2 * q + 2 * kv + 3 * ffn) + stream * width * recompute
        flight = stream * width if recompute else kept
        inner = whole = 4 * product * ffn + stream * width  # within SwiGLU's backward
        if recompute:  # one layer at a time keeps all its tensors again; in I, those for W are already in `queue`
            inner, whole = inner + max(0, kept - queue), whole + kept

        # Per token: embedding, head and document mask.
        first, last, table = layers.start == 0, layers.stop == model.layers, FLOAT * model.vocabulary
        flight_ends, waiting_ends, head = masked * recompute * model.sequence, 0, 0
        if first:  # the tokens, and the gradient of the embedded tokens
            flight_ends, waiting_ends = flight_ends + LONG, LONG + stream * width
        if last and fused:  # x, dx, the log-sums and targets; W repeats the projection
            flight_ends += width * (stream + 2 * product) + FLOAT + LONG
            waiting_ends += product * width + FLOAT + LONG
        elif last:  # x and the log-softmax; in I the gradients of both
            flight_ends += width * (stream + product) + table + FLOAT + LONG
            waiting_ends += product * (width + model.vocabulary)
            head = 2 * table

        self.flight = tokens * (len(layers) * flight + flight_ends)
        self.waiting = tokens * (len(layers) * queue + waiting_ends)
        chunk = min(CHUNK, product * model.vocabulary * tokens) if last and fused else 0
        self.op = max(tokens * max(inner, head), chunk)
        self.whole_op = max(tokens * max(whole, head), chunk)


__all__ = [
    "PROCESS",
    "Activations",
    "StageMemory",
    "layers_of_stages",
    "log_elsewhere",
    "parameter_memory",
    "parameters",
    "room_for_tensors",
    "stage_memory",
    "weight_grad_sizes",
]
