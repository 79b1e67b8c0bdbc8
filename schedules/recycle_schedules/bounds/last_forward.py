"""The bound of the last forward: the work left on two stages of one pipeline when the later stage ends its last F.

    from_first_to_last(n, F, early, whole, L, i_release, beyond, up, own)
    for n, speeds, together in pipelines(problem): ...

Consider the moment at which a pipeline's worker at stage u ends the last of its n F. The worker holds at most L
micro-batches, so most of its W are done. Let x be the number of held micro-batches whose gradient the worker has not
passed on. Every I that the worker has run has delayed its last F. Two things remain:

- The last micro-batch travels through the stages behind u and back to an earlier stage v of the pipeline. Stage v runs
  the I and W of this micro-batch.
- All x gradients return to v, one after the other, and v runs I and W of each.

A small x makes the last F late. A large x keeps stage v busy for long after the last F. For each x, the end is that of
the slower of the two things. The bound is the earliest end over all x. Bounds of a single stage cannot show this,
because each of the two stages alone could be faster.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..ops import Worker
from ..problem import Problem

Times = Any
"""A number, or an array that broadcasts with the others."""


def from_first_to_last(
    n: int, F: Times, early: Times, whole: Times, L: Times, i_release: float, beyond: Times, up: Times, own: Times
) -> np.ndarray:
    """The least time from a pipeline's first F at stage u to the end of its last W or B at an earlier stage v. The
    pipeline's own workers run all of its micro-batches at both stages.

    n          micro-batches of the pipeline, at least 1
    F          duration of F at u
    early      time that the backward at u takes until it passes on the gradient
    whole      duration of the whole backward at u
    L          maximum number of micro-batches in flight at u, at least 1
    i_release  share of a micro-batch's memory that the end of its I frees
    beyond     round trip of a micro-batch through the stages behind u
    up         time from the end of I at u to its start at v
    own        duration of the whole backward at v"""
    most = np.floor(np.minimum(L, n))
    held = np.minimum(L / (1 - i_release) if i_release < 1 else n, n)
    front = np.where(np.greater(n, L), np.maximum(0.0, beyond + (1 - most) * F), 0.0)  # idle before the first gradient
    none_missing = n * F + (n - held) * whole + held * early + front

    def end(x: Times) -> np.ndarray:
        return none_missing - x * early + early + up + np.maximum(beyond + own, x * own)

    even = np.minimum(1 + beyond / np.maximum(own, 1e-300), most)  # x for which both remaining parts take equally long
    best = np.where(np.greater(own, early), even, most)
    return np.minimum(end(np.floor(best)), end(np.ceil(best)))


def pipelines(p: Problem) -> list[tuple[int, np.ndarray, np.ndarray]]:
    """The kinds of pipelines as [(n, speeds, together), ...]. [] if a live worker need not run all micro-batches of its
    own pipeline.

    n         number of micro-batches
    speeds    (P,): speed of the worker at each stage
    together  (P, P): entry [u, v] is true if some pipeline of this kind has live workers at both stages u and v"""
    if p.reroute != "failed_only" and p.pipelines > 1:
        return []
    alive = np.zeros((p.pipelines, p.stages), dtype=bool)
    for s, live in enumerate(p.live):
        alive[list(live), s] = True
    kinds: dict[tuple[int, tuple[float, ...]], list[int]] = {}
    given, alike = p.speeds, (1.0,) * p.stages
    for d, n in enumerate(p.counts):
        speeds = tuple(given.get(Worker(d, s), 1.0) for s in range(p.stages)) if given else alike
        kinds.setdefault((n, speeds), []).append(d)
    return [(n, np.array(speeds), alive[of].T @ alive[of]) for (n, speeds), of in kinds.items() if n]
