"""The bound of the last forward: two stages of one pipeline, and what is left when the later one ends its last F.

    from_first_to_last(n, F, early, whole, L, i_release, beyond, up, own)
    for n, speeds, together in pipelines(problem): ...

Let a pipeline's worker at stage u end the last of its n F. Most of its W are done then, for it may hold at most L
micro-batches; of x that it holds the gradient is not passed on yet. Each I that it did before has put off this F. Two
things are still to come:

- the last micro-batch goes all the way through the stages behind u and back, to an earlier stage v of the pipeline,
  and has I and W there;
- all x gradients go back to v, one after the other, and v has I and W of each.

With a small x the last F comes late, with a large one stage v is busy for long after it: the bound is the least maximum
over all x. The bounds of one stage miss it, because each of the two stages alone could do better.
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
    """The least time from a pipeline's first F at stage u to the end of its last W or B at an earlier stage v, where
    the pipeline's own workers run all of its n >= 1 micro-batches at both.

    F, early, whole, L: at u: a micro-batch's F, its backward until the gradient is passed on, its whole backward; most
    in flight (>= 1). beyond: round trip of a micro-batch through the stages behind u. up: from the end of I at u to its
    start at v. own: whole backward at v."""
    most = np.floor(np.minimum(L, n))
    held = np.minimum(L / (1 - i_release) if i_release < 1 else n, n)
    front = np.where(np.greater(n, L), np.maximum(0.0, beyond + (1 - most) * F), 0.0)  # idle until a first gradient
    none_missing = n * F + (n - held) * whole + held * early + front

    def end(x: Times) -> np.ndarray:
        return none_missing - x * early + early + up + np.maximum(beyond + own, x * own)

    even = np.minimum(1 + beyond / np.maximum(own, 1e-300), most)  # the trip takes as long as so many I and W
    best = np.where(np.greater(own, early), even, most)
    return np.minimum(end(np.floor(best)), end(np.ceil(best)))


def pipelines(p: Problem) -> list[tuple[int, np.ndarray, np.ndarray]]:
    """The kinds of pipelines that run their own micro-batches wherever their worker lives: how many micro-batches,
    speeds (P,), and at which two stages one of the kind has both workers, (P, P). None where micro-batches may go
    anywhere."""
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
