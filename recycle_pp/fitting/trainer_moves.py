"""Predicts whether the trainer would move layers after the next death, or only re-route (`schedule.rebalance`).

    for worker, decision in decisions(problem, settings, layout).items(): decision.moves, decision.move.gain

The prediction is for the first outage of a job, whose expected length is `schedule.outage`, and for links of the
default bandwidth.
"""

from __future__ import annotations

from typing import NamedTuple

from recycle_schedules import Problem, Worker
from recycle_schedules.layers import Layout

from recycle_pp.config.settings import Settings

from .layout_search import Found, search
from .model_layers import ModelLayers
from .move_policy import BANDWIDTH, Move


class Decision(NamedTuple):
    """
    found  the best layout after the death
    move   its gain and cost
    moves  whether the trainer would move the layers
    """

    found: Found
    move: Move
    moves: bool


def decisions(problem: Problem, settings: Settings, layout: Layout) -> dict[Worker, Decision]:
    """The decision after the death of each worker whose stage has another live worker.

    A worker has no entry if the present layout stays the best one after its death.

    problem  a problem with durations in seconds
    layout   the present layout
    """
    layers, whole = ModelLayers(settings), problem.replace(failed=None)
    alike = not problem.dead and not problem.speeds and problem.limits_alike and problem.graph.uniform
    known: dict[object, Found | None] = {}
    made = {}
    for worker in problem.workers():
        if len(problem.live[worker.stage]) == 1:
            continue
        key = worker.stage if alike else worker
        if key not in known:
            known[key] = search(whole, set(problem.workers()) - {worker}, layers, layout)
        if (found := known[key]) is not None:
            outage, seconds = settings.schedule.outage, found.most / BANDWIDTH + found.now
            move = Move(found.now, found.then, outage, seconds, back=True)
            made[worker] = Decision(found, move, move.pays(settings.schedule.rebalance))
    return made
