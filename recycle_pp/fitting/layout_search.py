"""The best layout of the decoder layers for the live workers, and what a move to it sends.

    found = search(whole, live, layers, current)     # whole: the job's problem; None: the layers stay
    found.layout, found.now, found.then              # (9, 9, 6, 8), and the planned steps in both layouts
    found.whole                                      # the job's problem in the new layout

A layout that does not fit into `parallel.memory` is not chosen, nor one whose receivers lack room for the arriving
layers beside their own.
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
    """
    layout     the number of decoder layers of each stage
    whole      the job's problem in this layout, without deaths
    live       the same with the present deaths
    now, then  planned duration of a step in the present layout, and in this one
    bytes      state that all receivers get, in bytes
    most       the largest part of it that one worker sends or receives
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
    """The best layout that was found; None if that is the present one, or if it does not fit.

    whole    the job's problem in the present layout, without deaths
    live     the workers that take part
    current  the present layout
    keep     the layout to use while no worker is dead, that of an explicit `model.split`

    A pure function, for any thread. Takes up to a second.
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
    """The layout of the shortest plan; None if no layout fits."""
    counted = problem.replace(memory=None)
    times: dict[str, list[float]] = {kind: by_layer(counted.per_stage(kind), current) for kind in TIMES}
    try:
        return plan_layout(layered(problem, times, layers)).layout
    except ValueError:
        return None


def layered(problem: Problem, times: Mapping[str, list[float]], layers: ModelLayers) -> Problem:
    """The problem with `layers` instead of the durations and the memory of its stages.

    times: F, I, W and optionally O of each decoder layer, (L,)
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
    """Whether the stages fit into the memory of their workers, and the arriving layers beside the present ones."""
    if before.memory is None or before.modes is None or after.memory is None:
        return True
    try:
        after.replace(memory={**after.memory, "least": 0})
    except ValueError:
        return False
    for stage, gained in enumerate(layers.gained(current, target)):
        peers, mode = len(before.live[stage]), before.modes[stage]
        ran = -(-before.total // peers)
        most = min(ran, max(before.limit(Worker(d, stage)) for d in before.live[stage]))
        held = sum(mode.memory.peak(peers, ran, most, mode.whole).values())
        arriving = sum(sum(_alone(layers, k).always(peers, 0).values()) for k in gained)
        if held + arriving > before.memory["capacity"]:
            return False
    return True


def _alone(layers: ModelLayers, layer: int) -> StageMemory:
    """Memory of a stage with one decoder layer, and with the embedding or the head if it is the first or the last."""
    settings = layers.settings((1,) * layers.depth)
    return stage_memory(settings, layer, device=device_of(settings))


def _sizes(problem: Problem, layers: ModelLayers, current: Layout, target: Layout) -> tuple[int, float]:
    """`Found.bytes` and `Found.most`."""
    owner = [stage for stage, count in enumerate(current) for _ in range(count)]
    total, sent, most = 0, [0.0] * problem.stages, 0.0
    for stage, gained in enumerate(layers.gained(current, target)):
        peers = len(problem.live[stage])
        received = layers.state_bytes(gained, peers)
        total, most = total + peers * received, max(most, received)
        for layer in gained:
            sent[owner[layer]] += peers * layers.state_bytes([layer], peers) / len(problem.live[owner[layer]])
    return total, max(most, *sent)
