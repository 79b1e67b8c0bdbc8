"""Searches for the best layout of the decoder layers on the live workers.

    found = search(whole, live, layers, current)     # None if no layer should move
    found.layout, found.now, found.then              # (9, 9, 6, 8), and the planned step before and after the move
    found.whole                                      # the job's problem in the new layout
    found.bytes                                      # bytes that the move sends

The layout fits into `parallel.memory`, and during the move the receivers have room for the arriving layers in addition
to their present ones.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from recycle_schedules import Problem, StageMemory, Worker, plan, plan_layout
from recycle_schedules.layers import TIMES, Layout

from recycle_pp.model.memory import stage_memory
from recycle_pp.protocol.live_problem import LiveProblem

from .layer_values import by_layer
from .model_layers import ModelLayers
from .problem import device_of, relaid_problem


@dataclass(frozen=True)
class Found:
    """A better layout.

    layout  the number of decoder layers of each stage
    whole   the job's problem in this layout, without deaths
    live    the same problem with the present deaths
    now     planned duration of a step in the present layout
    then    planned duration of a step in this layout
    bytes   bytes of state that all receivers get
    most    bytes of state that the busiest worker sends or receives
    """

    layout: Layout
    whole: Problem
    live: Problem
    now: float
    then: float
    bytes: int
    most: float


def search(
    whole: Problem, live: Collection[Worker], layers: ModelLayers, current: Layout, keep: Layout | None = None
) -> Found | None:
    """The best layout found. None if it is the present layout, or if it does not fit into memory.

    whole    the job's problem in the present layout, without deaths
    live     the workers that take part
    current  the present layout
    keep     the layout of an explicit `model.split`, which applies while no worker is dead

    A pure function that any thread may call. Takes up to a second.
    """
    problem = LiveProblem().of(whole, live)
    target = keep if keep and not problem.dead else _best(problem, layers, current)
    if target is None or target == current:
        return None
    moved = relaid_problem(whole, layers.settings(target), current, target)
    after = LiveProblem().of(moved, live)
    if not _fits(problem, after, layers, current, target):
        return None
    sizes = _sizes(problem, layers, current, target)
    return Found(target, moved, after, plan(problem).value, plan(after).value, *sizes)


def _best(problem: Problem, layers: ModelLayers, current: Layout) -> Layout | None:
    """The layout with the shortest plan; None if no layout fits."""
    counted = problem.replace(memory=None)
    times: dict[str, list[float]] = {kind: by_layer(counted.per_stage(kind), current) for kind in TIMES}
    try:
        return plan_layout(layered(problem, times, layers)).layout
    except ValueError:
        return None


def layered(problem: Problem, times: Mapping[str, list[float]], layers: ModelLayers) -> Problem:
    """A copy of the problem with durations and memory per layer instead of per stage.

    times: kind of op (F, I, W and optionally O) -> its duration for each of the L decoder layers
    """
    if problem.memory is None:
        return problem.replace(durations=None, layers=times)
    alone = [_alone(layers, k) for k in range(layers.depth)]
    sizes = {
        "bytes": [sum(memory.always(problem.pipelines, 0).values()) for memory in alone],
        "activation_bytes": [memory.each() for memory in alone],
    }
    capacity = problem.memory["capacity"]
    return problem.replace(memory=None, durations=None, layers={**times, **sizes}, capacity_bytes=capacity)


def _fits(before: Problem, after: Problem, layers: ModelLayers, current: Layout, target: Layout) -> bool:
    """Whether workers have room for their new stages, and during the move for arriving and present layers together."""
    if before.memory is None or after.memory is None:
        return True
    try:
        after.replace(memory={**after.memory, "least": 0})
    except ValueError:
        return False
    for stage, gained in enumerate(layers.gained(current, target)):
        live = before.live[stage]
        arriving = sum(sum(_alone(layers, k).always(len(live), 0).values()) for k in gained)
        if arriving > min(before.room(Worker(d, stage)) for d in live):
            return False
    return True


def _alone(layers: ModelLayers, layer: int) -> StageMemory:
    """Memory of a stage with only this decoder layer, plus the embedding for the model's first layer and the head for
    its last layer."""
    settings = layers.settings((1,) * layers.depth)
    return stage_memory(settings, layer, device=device_of(settings))


def _sizes(problem: Problem, layers: ModelLayers, current: Layout, target: Layout) -> tuple[int, float]:
    """(`Found.bytes`, `Found.most`) of the move from one layout to the other."""
    owner = [stage for stage, count in enumerate(current) for _ in range(count)]
    total, sent, most = 0, [0.0] * problem.stages, 0.0
    for stage, gained in enumerate(layers.gained(current, target)):
        peers = len(problem.live[stage])
        received = layers.state_bytes(gained, peers)
        total, most = total + peers * received, max(most, received)
        for layer in gained:
            sent[owner[layer]] += peers * layers.state_bytes([layer], peers) / len(problem.live[owner[layer]])
    return total, max(most, *sent)
